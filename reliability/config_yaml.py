"""YAML text to a tree of plain values, strictly; and a tree to text that every YAML and JSON reader agrees on. Pure.

Scalars are read as YAML 1.2 reads them: `3e-3` is a number, `no` and `12:30` are text, `010` is text. Twice the same
key, tags, several documents and oversized input are errors: each of them hides what a person meant.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import yaml

LIMIT_BYTES: Final = 256 * 1024
"""A run file is a page; a mistaken path to a data file should not be parsed for minutes."""

_TAG: Final = "tag:yaml.org,2002:"

Tree = dict[str, "Tree"] | list["Tree"] | str | int | float | bool | None


class YamlError(ValueError):
    """Text that is not acceptable YAML, with the place in it."""


class _Loader(yaml.SafeLoader):
    """SafeLoader without tags, YAML 1.1 surprises and silent duplicate keys."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # here, and not when values are built: merge keys may then rightly bring a key in again
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        first_line: dict[str, int] = {}
        for key_node, _ in node.value:
            mark = key_node.start_mark
            if key_node.tag == _TAG + "merge":
                continue
            if key_node.tag != _TAG + "str":
                raise yaml.composer.ComposerError(None, None, "a key must be text; write it in quotes", mark)
            if key_node.value in first_line:
                where = f"first on line {first_line[key_node.value] + 1}"
                raise yaml.composer.ComposerError(None, None, f"'{key_node.value}' is given twice, {where}", mark)
            first_line[key_node.value] = mark.line
        return node


_Loader.yaml_constructors = {
    **{
        tag: yaml.SafeLoader.yaml_constructors[tag]
        for tag in (_TAG + t for t in ("null", "bool", "int", "float", "str", "seq", "map"))
    },
    None: yaml.SafeLoader.yaml_constructors[None],
}
_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?", list("-+0123456789.")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})$"), _first)


def parse_yaml(text: str | bytes) -> Tree:
    """The one document in this text. Raises YamlError, and nothing else, for any input."""
    if len(text) > LIMIT_BYTES:
        raise YamlError(f"{len(text):,} bytes; expected a file of at most {LIMIT_BYTES:,} bytes")
    try:
        tree: Tree = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        # "expected a single document ..., but found another": two halves of one sentence
        split = (error.problem or "").startswith("but ")
        problem = f"{error.context}, {error.problem}" if split else error.problem or error.context
        raise YamlError(f"{where}{problem}") from None
    except yaml.YAMLError as error:
        raise YamlError(" ".join(str(error).split())) from None
    except RecursionError:
        raise YamlError("nested too deeply; a run file has three levels") from None
    except (ValueError, KeyError, IndexError):
        # explicit tags over the wrong text, numbers of thousands of digits
        raise YamlError("a value does not fit its type; expected plain text, numbers, true, false and lists") from None
    return tree


def render_yaml(tree: Tree, indent: str = "") -> str:
    """JSON in form; read back to the same values by JSON, YAML 1.1 and YAML 1.2 readers."""
    inner = indent + "  "
    if isinstance(tree, dict) and tree:
        rows = (f"{inner}{_quote(key)}: {render_yaml(value, inner)}" for key, value in tree.items())
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(tree, list) and tree:
        return "[" + ", ".join(render_yaml(value, inner) for value in tree) + "]"
    if isinstance(tree, str):
        return _quote(tree)
    if isinstance(tree, float):
        return _render_float(tree)
    return json.dumps(tree)


def _render_float(value: float) -> str:
    text = repr(value)
    # YAML 1.1 calls 1e-05 text: it wants the point
    return text.replace("e", ".0e") if "e" in text and "." not in text else text


# printable to JSON, but a line break, a byte order mark or not printable to YAML
_ESCAPED: Final = re.compile("[\x7f-\xa0\u2028\u2029\ufeff\ufffe\uffff]")


def _quote(text: str) -> str:
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))
