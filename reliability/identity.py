"""What a run was made of: code, packages, script, image, seeds, each with what a change means at a restart.

fatal: an attempt with another value would be another training. warn: it may be. drift: free to change.
`compare` is pure; `take_identity` reads files, git and the installed packages' metadata and imports none of them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from outlast.reliability.config_yaml import render_yaml
from outlast.reliability.model import Noun
from outlast.reliability.runfile import RunFile

SCHEMA: Final = 1
_GIT_TIMEOUT_S: Final = 10.0


class Policy(StrEnum):
    FATAL = "fatal"
    WARN = "warn"
    DRIFT = "drift"


class Item(Noun, frozen=True, kw_only=True):
    name: str
    value: str
    """'' where it does not exist."""
    policy: Policy


class Identity(Noun, frozen=True, kw_only=True):
    """identity.json."""

    schema: int
    """SCHEMA of the version that wrote it."""
    run: str
    items: tuple[Item, ...]


class Change(Noun, frozen=True, kw_only=True):
    name: str
    was: str
    now: str
    policy: Policy


_PACKAGES: Final = {
    "torch": Policy.FATAL,
    "megatron-core": Policy.FATAL,
    "transformer-engine": Policy.FATAL,
    "numpy": Policy.WARN,
    "nvidia-resiliency-ext": Policy.WARN,
    "outlast": Policy.DRIFT,
    "msgspec": Policy.DRIFT,
}


def compare(was: Identity, now: Identity) -> tuple[Change, ...]:
    """What changed, fatal first. An item that only one side knows (another version of outlast) may drift."""
    before = {item.name: item for item in was.items}
    changes = [
        Change(name=item.name, was=before[item.name].value, now=item.value, policy=before[item.name].policy)
        for item in now.items
        if item.name in before and item.value != before[item.name].value
    ]
    return tuple(sorted(changes, key=lambda change: tuple(Policy).index(change.policy)))


def take_identity(run: RunFile, name: str) -> Identity:
    """What this run would be made of if it began now, on this node."""
    return Identity(schema=SCHEMA, run=name, items=tuple(_items(run)))


def _items(run: RunFile) -> Iterator[Item]:
    workdir = Path(run.task.workdir or ".")
    commit = dirty = ""
    if run.task.workdir:  # without one, "here" is another place on another node
        commit, dirty = _git(workdir, "rev-parse", "HEAD"), _git(workdir, "status", "--porcelain", "-uno")
    yield Item(name="code_commit", value=commit, policy=Policy.WARN)
    yield Item(name="code_changes_sha256", value=_sha256(dirty.encode()) if dirty else "", policy=Policy.WARN)
    script = workdir / run.task.script if run.task.script else None
    yield Item(name="script_sha256", value=hash_file(script), policy=Policy.FATAL)
    image = Path(run.task.container) if run.task.container.startswith("/") else None
    yield Item(name="container_sha256", value=hash_file(image), policy=Policy.FATAL)
    yield Item(name="params_sha256", value=_sha256(render_yaml(dict(run.params)).encode()), policy=Policy.FATAL)
    for param, value in run.params.items():
        if "seed" in param.lower():
            yield Item(name=f"param_{param}", value=str(value), policy=Policy.FATAL)
    yield Item(name="python", value=platform.python_version(), policy=Policy.WARN)
    for package, policy in _PACKAGES.items():
        yield Item(name=f"package_{package}", value=_version(package), policy=policy)


def hash_file(path: Path | None) -> str:
    """sha256, or '' where there is no such file."""
    if path is None or not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _git(workdir: Path, *words: str) -> str:
    """git's answer, or '' where there is no git or no repository: code need not live in one."""
    try:
        done = subprocess.run(
            ["git", "-C", str(workdir), *words], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def read_identity(path: Path) -> Identity:
    return msgspec.json.decode(path.read_bytes(), type=Identity)
