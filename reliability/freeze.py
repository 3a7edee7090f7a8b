"""A run directory, made once: what was asked, frozen; who we are; the secret of the agent link.

The directory's name is claimed by mkdir, so two calls never share one. run.yaml is written last: a directory
without it was never finished, and is no run.
"""

from __future__ import annotations

import difflib
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from outlast.reliability.config import run_root_default
from outlast.reliability.config_yaml import Tree, render_yaml
from outlast.reliability.findings import ConfigError, Finding
from outlast.reliability.identity import take_identity
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import RunFile
from outlast.reliability.site_policy import read_rows, site_file

_NUMBERED: Final = re.compile(r"(.+)-([0-9]{4,9})")
_TRIES: Final = 100
_PRIVATE_DIR: Final = 0o700
_PRIVATE_FILE: Final = 0o600


def freeze(run: RunFile, run_root: Path) -> RunDir:
    """A new run directory RUN_ROOT/<name>-NNNN that holds this run, and the site's policy as it is now.

    Raises OSError where it cannot be made, ConfigError where the site's policy cannot be used.
    """
    site = site_file(run)
    rows = read_rows(site) if site else b""  # refused before a directory is made
    run = msgspec.structs.replace(run, cluster=msgspec.structs.replace(run.cluster, policy=str(site or "")))
    run_root.mkdir(parents=True, exist_ok=True)
    run_dir = _claim(run.name, run_root)
    if not run.checkpoint.dir:
        run = msgspec.structs.replace(
            run, checkpoint=msgspec.structs.replace(run.checkpoint, dir=str(run_dir.checkpoints))
        )
    for path in (run_dir.epochs, run_dir.orphans, run_dir.requests, run_dir.checkpoints, run_dir.root / "attempts"):
        path.mkdir(mode=_PRIVATE_DIR)
    write_durably(run_dir.secret, secrets.token_hex(32).encode())
    if site:
        write_durably(run_dir.policy, rows)
    identity = take_identity(run, run_dir.name)
    write_durably(run_dir.identity, msgspec.json.format(msgspec.json.encode(identity), indent=2) + b"\n")
    write_durably(run_dir.run_file, render_run(run).encode())
    return run_dir


def _claim(name: str, run_root: Path) -> RunDir:
    numbers = [int(found[2]) for found in map(_NUMBERED.fullmatch, os.listdir(run_root)) if found and found[1] == name]
    first = max(numbers, default=0) + 1
    for number in range(first, first + _TRIES):
        root = (run_root / f"{name}-{number:04d}").absolute()
        try:
            root.mkdir(mode=_PRIVATE_DIR)
        except FileExistsError:
            continue  # somebody else submitted just now
        return RunDir(root=root)
    raise FileExistsError(
        f"{run_root}: {_TRIES} run directories after {name}-{first:04d} were taken by others just now"
    )


def write_durably(path: Path, data: bytes) -> None:
    """Whole or not at all, mode 0600, on disk when this returns."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE_FILE)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def render_run(run: RunFile) -> str:
    """Every setting, defaults too: a later version's defaults must not change a run that exists."""
    return render_yaml(_plain(run)) + "\n"


def _plain(value: object) -> Tree:
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    assert value is None or isinstance(value, str | int | float | bool)
    return value


# ---------------------------------------------------------------- finding runs again


def list_runs(run_root: Path) -> tuple[RunDir, ...]:
    """The runs below this directory, by name."""
    try:
        names = sorted(os.listdir(run_root))
    except OSError:
        return ()
    runs = (RunDir(root=(run_root / name).absolute()) for name in names)
    return tuple(run_dir for run_dir in runs if run_dir.run_file.is_file())


def find_run(word: str, run_root: Path | None = None) -> RunDir:
    """The run that a person means: a path, or a name below the run root. ConfigError names near misses."""
    root = run_root or Path(run_root_default()[0])
    tried = [Path(word), root / word]
    for path in tried if word else ():
        if (path / "run.yaml").is_file():
            return RunDir(root=path.absolute())
    names = [run_dir.name for run_dir in list_runs(root)]
    raise ConfigError([Finding(source=word, text=f"no such run; looked for {_join(tried)}{_hint(word, names)}")])


def _hint(word: str, names: list[str]) -> str:
    numbered = [name for name in names if name.rpartition("-")[0] == word]
    near = numbered[-1:] or difflib.get_close_matches(word, names, 1, 0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _join(paths: Iterable[Path]) -> str:
    return " and ".join(str(path) for path in paths)
