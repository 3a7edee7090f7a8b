"""RUN.yaml from disk to a RunFile, with the source of every value. The only reader of the environment outside ranks.

    --set  >  --params FILE  >  the run file (and the params file it names)  >  OUTLAST_RUN_ROOT  >  default

What is wrong is collected and raised together (ConfigError). Freezing the result into a run directory is freeze.py.
Relative paths count from the directory where `outlast` was called; a `params: FILE` from the run file's own.
"""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from outlast.reliability.config_checks import Complaint, check_together
from outlast.reliability.config_shape import (
    AUTO_EVERY_S,
    SECTIONS,
    SETTINGS,
    TOP,
    Given,
    Key,
    check_value,
    path_of,
    settle_names,
)
from outlast.reliability.config_yaml import LIMIT_BYTES, Tree, YamlError, parse_yaml
from outlast.reliability.findings import ConfigError, Finding, printable, show
from outlast.reliability.model import Noun
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import RunFile

RUN_ROOT_ENV: Final = "OUTLAST_RUN_ROOT"


class KindRules(Protocol):
    """What the kinds of program add (launchers/adapt.py, handed in by the command line)."""

    def settle(self, run: RunFile) -> RunFile:
        """`auto` replaced by what is used."""

    def complain(self, run: RunFile) -> tuple[tuple[str, str], ...]:
        """(path, what is wrong) for whatever this kind of program cannot do."""


class Used(Noun, frozen=True, kw_only=True):
    """One setting that will be used, and where it comes from."""

    path: str
    value: object
    source: str


class ReadRun(Noun, frozen=True, kw_only=True):
    run: RunFile
    used: tuple[Used, ...]


def run_root_default() -> tuple[str, str]:
    """Where runs lie unless the run file says it, and the source of that."""
    named = os.environ.get(RUN_ROOT_ENV, "")
    return (named, RUN_ROOT_ENV) if named else ("runs", "default")


def read_run(
    path: Path, *, settings: Sequence[str] = (), params_file: Path | None = None, kinds: KindRules | None = None
) -> ReadRun:
    """The run file with everything from the command line laid over it; ConfigError with all findings."""
    findings: list[Finding] = []
    given: dict[Key, Given] = {}
    for tree, source in _read_layers(path, params_file, settings, findings):
        layer, wrong = settle_names(tree, source)
        findings += wrong
        given |= layer
    root, root_source = run_root_default()
    given.setdefault(("run_root",), Given(value=root, source=root_source, path="$.run_root"))
    values = _check_values(given, findings) | _find_missing(given, str(path), findings)
    if findings:
        raise ConfigError(findings)
    asked = settle_paths(_build(values))
    run = kinds.settle(asked) if kinds else _settle_auto(asked)
    complaints = [*check_together(run), *check_world(run)]
    if kinds and not complaints:  # they may rely on a layout that fits together
        complaints += [Complaint(path=path, text=text) for path, text in kinds.complain(run)]
    if complaints:
        raise ConfigError([_locate(one, given, str(path)) for one in complaints])
    return ReadRun(run=run, used=tuple(_list_used(run, asked, given)))


def load_frozen(run_dir: RunDir) -> RunFile:
    """The run of this directory; ConfigError where its run.yaml is missing or not ours."""
    path = run_dir.run_file
    try:
        return msgspec.convert(parse_yaml(path.read_bytes()), RunFile)
    except (YamlError, msgspec.ValidationError) as error:
        text = f"{error}; this file is written by outlast and not meant to be edited"
    except OSError as error:
        text = f"cannot be read: {error.strerror}; expected a directory made by `outlast submit` or `outlast run`"
    raise ConfigError([Finding(source=str(path), text=text)])


# ---------------------------------------------------------------- sources


def _read_layers(
    path: Path, params_file: Path | None, settings: Sequence[str], findings: list[Finding]
) -> Iterable[tuple[Tree, str]]:
    """Trees and their sources, weakest first."""
    tree = _read_tree(path, findings)
    if isinstance(tree, dict):
        named = tree.get("params")
        if isinstance(named, str):
            inner = path.parent / Path(named).expanduser()
            yield {key: value for key, value in tree.items() if key != "params"}, str(path)
            yield {"params": _read_tree(inner, findings)}, str(inner)
        else:
            yield tree, str(path)
    elif not findings:
        yield tree, str(path)
    if params_file is not None:
        yield {"params": _read_tree(params_file, findings)}, str(params_file)
    for text in settings:
        source = f"--set {printable(text if len(text) <= 80 else text[:77] + '...')}"
        try:
            yield parse_setting(text), source
        except YamlError as error:
            findings.append(Finding(source=source, text=str(error)))


def _read_tree(path: Path, findings: list[Finding]) -> Tree:
    try:
        with path.open("rb") as file:
            return parse_yaml(file.read(LIMIT_BYTES + 1))
    except YamlError as error:
        text = str(error)
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], 1, 0.5)
        text = "no such file" + (f"; did you mean {near[0]}?" if near else "")
    except (OSError, ValueError) as error:
        text = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    findings.append(Finding(source=str(path), text=text))
    return None


def parse_setting(text: str) -> Tree:
    """`lr=2e-4` (a parameter) or `cluster.nodes=4` (a setting of the run file) as a tree; raises YamlError."""
    name, equals, word = text.partition("=")
    words = name.strip().split(".")
    if not equals or not name.strip():
        raise YamlError(f"found {show(text)}, expected NAME=VALUE, such as lr=2e-4 or cluster.nodes=4")
    if words[0] not in (*SECTIONS, *TOP) or (words[0] == "params" and len(words) == 1):
        return {"params": {name.strip(): parse_yaml(word)}}
    if words[0] == "params":
        return {"params": {".".join(words[1:]): parse_yaml(word)}}
    if words[:2] == ["task", "env"] and len(words) > 2:
        return {"task": {"env": {".".join(words[2:]): word}}}  # as it is: the environment knows text alone
    tree = parse_yaml(word)
    for part in reversed(words):
        tree = {part: tree}
    return tree


# ---------------------------------------------------------------- values


def _check_values(given: dict[Key, Given], findings: list[Finding]) -> dict[Key, object]:
    values: dict[Key, object] = {}
    for key, one in given.items():
        values[key], wrong = check_value(key, one.value)
        if wrong:
            findings.append(Finding(source=one.source, path=one.path, text=wrong))
    return values


def _find_missing(given: dict[Key, Given], source: str, findings: list[Finding]) -> dict[Key, object]:
    if any(one.source == source and not one.path for one in findings):
        return {}  # the file itself could not be read: its settings are not missing
    if ("name",) not in given:
        findings.append(Finding(source=source, path="$.name", text="missing; expected the run's name, such as lm-7b"))
    if not any(key[0] == "task" for key in given):
        text = "missing; expected script, module or command, such as task: {script: pretrain_gpt.py}"
        findings.append(Finding(source=source, path="$.task", text=text))
    return {}


def _build(values: dict[Key, object]) -> RunFile:
    tree: dict[str, object] = {}
    for key, value in values.items():
        inner: dict[str, object] = tree
        for part in key[:-1]:
            below = inner.setdefault(part, {})
            assert isinstance(below, dict)
            inner = below
        inner[key[-1]] = value
    return msgspec.convert(tree, RunFile)


def settle_paths(run: RunFile) -> RunFile:
    """The same with absolute paths: other nodes and later calls start elsewhere."""

    def absolute(path: str) -> str:
        return os.path.abspath(Path(path).expanduser()) if path else ""

    replace = msgspec.structs.replace
    return replace(
        run,
        task=replace(run.task, workdir=absolute(run.task.workdir or ".")),
        cluster=replace(run.cluster, policy=absolute(run.cluster.policy)),
        checkpoint=replace(run.checkpoint, dir=absolute(run.checkpoint.dir)),
        notify=replace(run.notify, webhook_file=absolute(run.notify.webhook_file)),
        run_root=absolute(run.run_root),
    )


def _settle_auto(run: RunFile) -> RunFile:
    if run.checkpoint.every_steps or run.checkpoint.every_s:
        return run
    return msgspec.structs.replace(run, checkpoint=msgspec.structs.replace(run.checkpoint, every_s=AUTO_EVERY_S))


def _list_used(run: RunFile, asked: RunFile, given: dict[Key, Given]) -> Iterable[Used]:
    for key in SETTINGS:
        value, before = _value(run, key), _value(asked, key)
        if isinstance(value, dict):
            for name in value:
                inner = (*key, name)
                yield Used(
                    path=path_of(inner), value=value[name], source=given[inner].source if inner in given else "kind"
                )
            continue
        source = given[key].source if key in given else "default"
        yield Used(path=path_of(key), value=value, source=source if value == before else f"auto ({source})")


def _value(run: RunFile, key: Key) -> object:
    value: object = run
    for part in key:
        value = getattr(value, part)
    return value


def _locate(one: Complaint, given: dict[Key, Given], path: str) -> Finding:
    """The complaint with the source of the setting it names: a value from `--set` is mended there."""
    for key, written in given.items():
        if path_of(key) == one.path and written.source != RUN_ROOT_ENV:
            return Finding(source=written.source, path=one.path, text=one.text)
    return Finding(source=path, path=one.path, text=one.text)


# ---------------------------------------------------------------- what lies on disk


def check_world(run: RunFile) -> tuple[Complaint, ...]:
    """Script, container, webhook file and run root, as this machine sees them."""
    wrong = (
        ("$.task.workdir", _check_workdir(Path(run.task.workdir or "."))),
        ("$.task.script", _check_file(run.task.script, run.task.workdir)),
        ("$.task.container", _check_file(run.task.container if run.task.container.startswith("/") else "", "/")),
        ("$.notify.webhook_file", check_secret_file(Path(run.notify.webhook_file)) if run.notify.webhook_file else ""),
        ("$.run_root", _check_root(Path(run.run_root))),
    )
    return tuple(Complaint(path=path, text=text) for path, text in wrong if text)


def _check_workdir(path: Path) -> str:
    return "" if path.is_dir() else f"{path} is no directory; expected where the program is to be started"


def _check_file(name: str, base: str) -> str:
    if not name:
        return ""
    path = Path(base) / name
    if path.is_file():
        return ""
    near = difflib.get_close_matches(path.name, _names_beside(path), 1, 0.6)
    return f"no file {path}" + (f"; did you mean {near[0]}?" if near else "; expected a file that all nodes see")


def _names_beside(path: Path) -> list[str]:
    try:
        return [one.name for one in path.parent.iterdir()]
    except OSError:
        return []


def check_secret_file(path: Path) -> str:
    """'' where the file is there and its owner alone can read it."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}; expected a file that holds the URL"
    if mode & 0o077:
        return f"{path} has mode {mode:04o}, expected 0600: it holds a secret. Run: chmod 600 {path}"
    return ""


def _check_root(root: Path) -> str:
    place = root
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return f"{place} is no directory; expected a directory on a file system that all nodes see"
    return (
        "" if os.access(place, os.W_OK | os.X_OK) else f"{place} is not writable for you; expected a directory of yours"
    )
