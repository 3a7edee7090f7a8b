"""Trees of plain values to settings, each with its source: names, types, units, suggestions. Pure.

One tree a source (the file, a params file, one `--set`). `settle_names` knows the short names that people may write
(`walltime` for walltime_s, `checkpoint.every`) and finds unknown ones; `check_value` finds wrong values. What fits
together is config_checks.py.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import inspect

from outlast.reliability.config_yaml import Tree
from outlast.reliability.durations import DurationError, parse_duration
from outlast.reliability.findings import Finding, show
from outlast.reliability.model import Noun
from outlast.reliability.runfile import RunFile

Key = tuple[str, ...]
"""`("cluster", "nodes")`; a parameter is `("params", "lr")`."""

AUTO_EVERY_S: Final = 1800.0
"""What `checkpoint.every: auto` means: a save each 30 min."""

CHOICES: Final[Mapping[Key, tuple[str, ...]]] = {
    ("task", "kind"): ("auto", "reference", "megatron_lm", "plain"),
    ("cluster", "kind"): ("slurm", "local"),
    ("layout", "may_change"): ("dp", "tp", "pp", "cp", "ep"),
}
_EVERY: Final = ("checkpoint", "every")
_EVERY_STEPS: Final = ("checkpoint", "every_steps")
_EVERY_S: Final = ("checkpoint", "every_s")
_AUTO: Final = ("checkpoint", "auto")
_EVERY_EXPECTED: Final = "expected auto, a number of steps such as '500 steps', or a duration such as '20 min'"
_BIGGEST: Final = 2**63 - 1

PARAM_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")


class Given(Noun, frozen=True, kw_only=True):
    """One value as it was written, and where."""

    value: object
    source: str
    path: str
    """As written: `$.cluster.walltime`."""


class Setting(Noun, frozen=True, kw_only=True):
    """One thing that a run file may set."""

    key: Key
    type: object
    """msgspec.inspect.Type."""
    default: object = None
    required: bool = False

    @property
    def is_duration(self) -> bool:
        return isinstance(self.type, inspect.FloatType) and self.key[-1].endswith("_s")


def _list_settings() -> dict[Key, Setting]:
    found: dict[Key, Setting] = {}
    top = inspect.type_info(RunFile)
    assert isinstance(top, inspect.StructType)
    for field in top.fields:
        if not isinstance(field.type, inspect.StructType):
            found[field.name,] = _setting((field.name,), field)
            continue
        for inner in field.type.fields:
            found[field.name, inner.name] = _setting((field.name, inner.name), inner)
    return found


def _setting(key: Key, field: inspect.Field) -> Setting:
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return Setting(key=key, type=field.type, default=default, required=field.required)


SETTINGS: Final[Mapping[Key, Setting]] = _list_settings()
"""Every setting of RUN.yaml in its order."""
SECTIONS: Final = tuple(dict.fromkeys(key[0] for key in SETTINGS if len(key) == 2))
TOP: Final = tuple(key[0] for key in SETTINGS if len(key) == 1)
_SHORT: Final[Mapping[Key, Key]] = {
    **{(*key[:-1], key[-1][:-2]): key for key, setting in SETTINGS.items() if setting.is_duration},
    _EVERY: _EVERY,
}
"""Names without the unit that are read too. `checkpoint.every` is apart: it may be steps or a time."""


def path_of(key: Sequence[str]) -> str:
    return ".".join(("$", *key))


# ---------------------------------------------------------------- names


def settle_names(tree: Tree, source: str) -> tuple[dict[Key, Given], list[Finding]]:
    """The settings of one source under their full names, and what is wrong with the names."""
    given: dict[Key, Given] = {}
    findings: list[Finding] = []
    for written, value in _leaves(tree, source, findings):
        key = _SHORT.get(written, written)
        one = Given(value=value, source=source, path=path_of(written))
        if written[0] not in ("params",) and written[:2] != ("task", "env") and written not in _names():
            findings.append(Finding(source=source, path=one.path, text=_unknown(written)))
        elif key in given:
            findings.append(Finding(source=source, path=one.path, text=f"given twice, also as {given[key].path}"))
        else:
            given[key] = one
    return _settle_every(given, findings), findings


def _leaves(tree: Tree, source: str, findings: list[Finding]) -> Iterable[tuple[Key, Tree]]:
    """The tree's values with their written keys; a section that is no mapping becomes a finding."""
    if not isinstance(tree, dict):
        findings.append(
            Finding(source=source, path="$", text=f"found {show(tree)}, expected a mapping such as name: lm-7b")
        )
        return
    for name, value in tree.items():
        if name not in SECTIONS and name != "params":
            yield (name,), value
        elif value is None:
            continue  # `notify:` with nothing below it
        elif not isinstance(value, dict):
            inside = (
                f"{', '.join(_names_in(name)[:4])} ..." if name != "params" else "parameters, or a YAML file's name"
            )
            text = f"found {show(value)}, expected a mapping of {inside}"
            findings.append(Finding(source=source, path=path_of((name,)), text=text))
        else:
            for inner, leaf in value.items():
                if (name, inner) == ("task", "env") and isinstance(leaf, dict):
                    yield from (((name, inner, variable), word) for variable, word in leaf.items())
                elif (name, inner) != ("task", "env") or leaf is not None:
                    yield (name, inner), leaf


def _names() -> set[Key]:
    return {*SETTINGS, *_SHORT}


def _names_in(section: str) -> list[str]:
    return [key[1] for key in SETTINGS if key[0] == section and len(key) == 2]


def _unknown(key: Key) -> str:
    here = [known[-1] for known in (*SETTINGS, *_SHORT) if known[:-1] == key[:-1]]
    here += SECTIONS if len(key) == 1 else []
    close = difflib.get_close_matches(key[-1], here, 1, 0.6)
    if close:
        return f"no such setting; did you mean {close[0]}?"
    elsewhere = [known for known in (*SETTINGS, *_SHORT) if known[-1] == key[-1] and known[:-1] != key[:-1]]
    if elsewhere:
        return f"no such setting here; did you mean {'.'.join(elsewhere[0])}?"
    return f"no such setting; expected one of {', '.join(dict.fromkeys(here))}"


def _settle_every(given: dict[Key, Given], findings: list[Finding]) -> dict[Key, Given]:
    """`checkpoint.every` as every_steps and every_s; one that is given puts the other one to 0 in lower sources."""
    ways = [key for key in (_EVERY, _EVERY_STEPS, _EVERY_S) if key in given]
    if not ways:
        return given
    one = given[ways[0]]
    if len(ways) > 1 and all(given[way].value != 0 for way in ways):
        text = f"given together with {given[ways[1]].path}; expected one of them"
        findings.append(Finding(source=one.source, path=one.path, text=text))
    steps, seconds = given.pop(_EVERY_STEPS, None), given.pop(_EVERY_S, None)
    every = given.pop(_EVERY, None)
    if every is not None:
        steps, seconds = _read_every(every, findings)
    zero = msgspec.structs.replace(one, value=0)
    given.setdefault(_AUTO, msgspec.structs.replace(one, value=every is not None and every.value == "auto"))
    given[_EVERY_STEPS], given[_EVERY_S] = steps or zero, seconds or zero
    return given


def _read_every(every: Given, findings: list[Finding]) -> tuple[Given | None, Given | None]:
    """(steps, seconds) of one `every`; (None, None) is auto."""
    text = every.value
    if text == "auto":
        return None, None
    if isinstance(text, str):
        counted = re.fullmatch(r"\s*([0-9]{1,12})\s*(?:train_)?steps?\s*", text)
        if counted and int(counted[1]):
            return msgspec.structs.replace(every, value=int(counted[1])), None
        try:
            if parse_duration(text):
                return None, msgspec.structs.replace(every, value=text)
        except DurationError:
            pass
    meant = (
        f"; did you mean '{text} steps'?" if isinstance(text, int) and not isinstance(text, bool) and text > 0 else ""
    )
    shown = f"found {show(text)}, {_EVERY_EXPECTED}{meant}"
    findings.append(Finding(source=every.source, path=every.path, text=shown))
    return None, None


# ---------------------------------------------------------------- values


def check_value(key: Key, value: object) -> tuple[object, str]:
    """The value as the setting holds it, and '' or what is wrong with it."""
    if key[0] == "params" and len(key) == 2:
        return value, _check_param(key[1], value)
    if key[:2] == ("task", "env") and len(key) == 3:
        return value, _check_env(key[2], value)
    setting = SETTINGS[key]
    if setting.is_duration:
        return _check_duration(value)
    kind = setting.type
    wrong = ""
    if isinstance(kind, inspect.IntType):
        wrong = _check_count(value, kind.ge or 0)
    elif isinstance(kind, inspect.StrType):
        wrong = _check_text(value, kind.pattern)
    elif isinstance(kind, inspect.BoolType):
        wrong = "" if isinstance(value, bool) else f"found {show(value)}, expected true or false"
    elif isinstance(kind, inspect.VarTupleType):
        wrong = _check_words(value, CHOICES.get(key, ()))
    elif isinstance(kind, inspect.DictType):
        wrong = f"found {show(value)}, expected a mapping such as {{NAME: 'value'}}"
    if not wrong and key in CHOICES and isinstance(value, str):
        wrong = _check_choice(value, CHOICES[key])
    return value, wrong


def _check_duration(value: object) -> tuple[object, str]:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return value, f"found {show(value)}, expected a duration such as 90s, 20min or 7d"
    try:
        return parse_duration(value), ""
    except (DurationError, OverflowError) as error:
        return value, f"found {show(value)}, {error if isinstance(error, DurationError) else 'expected less'}"


def _check_count(value: object, least: int) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= _BIGGEST:
        return ""
    hint = "; write it without quotes" if isinstance(value, str) and value.isdecimal() else ""
    return f"found {show(value)}, expected a whole number, {least} or more{hint}"


def _check_text(value: object, pattern: str | None) -> str:
    if not isinstance(value, str):
        scalar = isinstance(value, int | float) and abs(value) < 10**20
        return f"found {show(value)}, expected text" + (f"; write it in quotes: '{show(value)}'" if scalar else "")
    if pattern and not re.fullmatch(pattern, value):
        return (
            f"found {show(value)}, expected a name of at most 64 letters, digits and . _ -, "
            "beginning with a letter or a digit"
        )
    return _check_characters(value)


def _check_characters(text: str) -> str:
    """NUL ends a word for the kernel, and half a surrogate pair cannot be written to a file."""
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        return f"found {show(text)}, expected text without NUL characters and broken UTF-8"
    return ""


def _check_words(value: object, choices: Sequence[str]) -> str:
    if isinstance(value, str):
        return f"found {show(value)}, expected a list of words; write {_as_list(value)}"
    if not isinstance(value, list):
        return f"found {show(value)}, expected a list of words"
    for index, word in enumerate(value):
        wrong = _check_text(word, None) or (_check_choice(word, choices) if choices else "")
        if wrong:
            return f"item {index + 1}: {wrong}"
    return ""


def _as_list(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    return show(f"[{', '.join(words)}]")[1:-1]


def _check_choice(value: str, choices: Sequence[str]) -> str:
    if value in choices:
        return ""
    close = difflib.get_close_matches(value, choices, 1, 0.5)
    return f"found {show(value)}, expected one of {', '.join(choices)}" + (
        f"; did you mean {close[0]}?" if close else ""
    )


def _check_param(name: str, value: object) -> str:
    if not PARAM_NAME.fullmatch(name):
        bare = name.lstrip("-")
        hint = f"; write {bare}" if PARAM_NAME.fullmatch(bare) else ""
        return f"{show(name)} is no parameter name, expected letters, digits and _ . - after a letter{hint}"
    if isinstance(value, list | dict):
        return f"found {show(value)}, expected one value; arguments that take several words go to task.args"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _BIGGEST:
        return f"found {show(value)}, expected a number of at most 64 bits; put it in quotes"
    if isinstance(value, float) and value - value != 0:
        return f"found {show(value)}, expected a finite number; put it in quotes if the program wants it so"
    if value is not None and not isinstance(value, str | int | float):
        return f"found {show(value)}, expected text, a number, true, false or null"
    return _check_characters(value) if isinstance(value, str) else ""


def _check_env(name: str, value: object) -> str:
    if not ENV_NAME.fullmatch(name):
        return f"{show(name)} is no name of an environment variable, expected letters, digits and _"
    return _check_text(value, None)
