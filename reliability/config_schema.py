"""JSON Schema of what a person may write in RUN.yaml, short names and durations included.

Made from the structs, so that it cannot differ from what is read; the sentences below the fields become descriptions.
"""

from __future__ import annotations

import ast
import inspect as source
from typing import Any, Final

import msgspec
from msgspec import inspect

from outlast.reliability import runfile
from outlast.reliability.config_shape import CHOICES, SETTINGS, Setting

Schema = dict[str, Any]

_DURATION: Final = {
    "oneOf": [
        {"type": "number", "minimum": 0},
        {"type": "string", "pattern": r"^\s*([0-9]+(\.[0-9]+)?\s*[A-Za-z]+\s*)+$"},
    ]
}
_SCALAR: Final = {"type": ["string", "number", "boolean", "null"]}


def run_schema() -> Schema:
    """The document, draft 2020-12."""
    sections: dict[str, Schema] = {}
    top: Schema = {}
    texts = _field_texts()
    for key, setting in SETTINGS.items():
        place = top
        if len(key) == 2:
            section = sections.setdefault(key[0], _object({}))
            place = section["properties"]
            top[key[0]] = section
        one = _describe(setting, texts.get(key[-1] if len(key) == 1 else f"{key[0]}.{key[1]}", ""))
        place[key[-1]] = one
        if setting.is_duration and key != ("checkpoint", "every_s"):
            place[key[-1].removesuffix("_s")] = one
    top["checkpoint"]["properties"]["every"] = {
        "type": "string",
        "description": "auto, a number of steps such as '500 steps', or a duration such as '20 min'.",
    }
    top["params"] = {
        "description": texts.get("params", ""),
        "oneOf": [{"type": "object", "additionalProperties": _SCALAR}, {"type": "string"}],
    }
    ways = [{"required": [way]} for way in ("script", "module", "command")]
    top["task"]["oneOf"] = ways
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "RUN.yaml of outlast",
        **_object(top),
        "required": [key[0] for key, setting in SETTINGS.items() if setting.required] + ["task"],
    }


def _object(properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _describe(setting: Setting, text: str) -> Schema:
    kind, one = setting.type, Schema()
    if setting.is_duration:
        one = dict(_DURATION)
    elif isinstance(kind, inspect.IntType):
        one = {"type": "integer", "minimum": kind.ge or 0}
    elif isinstance(kind, inspect.BoolType):
        one = {"type": "boolean"}
    elif isinstance(kind, inspect.StrType):
        one = {"type": "string", **({"pattern": kind.pattern} if kind.pattern else {})}
    elif isinstance(kind, inspect.VarTupleType):
        one = {"type": "array", "items": {"type": "string"}}
    elif isinstance(kind, inspect.DictType):
        one = {"type": "object", "additionalProperties": {"type": "string"}}
    choices = CHOICES.get(setting.key)
    if choices and "items" in one:
        one["items"] = {"enum": list(choices)}
    elif choices:
        one["enum"] = list(choices)
    if not setting.required:
        one["default"] = msgspec.to_builtins(setting.default)
    return {**one, **({"description": text} if text else {})}


def _field_texts() -> dict[str, str]:
    """`cluster.nodes` -> the sentence that stands below the field in runfile.py."""
    sections = {"Task": "task", "LayoutAsked": "layout", "RunFile": ""}
    texts: dict[str, str] = {}
    for node in ast.parse(source.getsource(runfile)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        section = sections.get(node.name, node.name.lower())
        for field, below in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(field.target, ast.Name):
                text = below.value.value if isinstance(below.value, ast.Constant) else ""
                texts[f"{section}.{field.target.id}".lstrip(".")] = " ".join(str(text).split())
    return texts
