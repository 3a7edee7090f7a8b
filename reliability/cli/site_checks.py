"""What `outlast doctor` looks at on this machine itself: the shared file system, packages, name clashes, secrets.

Each check is a function that answers with rows and raises nothing: a check that cannot be made is a row too. Slurm's
own settings are looked at by slurm/fitness.py.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

from outlast.reliability.config import check_secret_file
from outlast.reliability.model import Noun
from outlast.reliability.runfile import RunFile

PROBE_BYTES: Final = 64 * 1024 * 1024
_SLOW_BYTES_PER_S: Final = 200e6
"""Below this a checkpoint of a few hundred gigabytes takes the better part of an hour."""
_LITTLE_BYTES: Final = 50e9


class Grade(StrEnum):
    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    UNFIT = "unfit"


class Row(Noun, frozen=True, kw_only=True):
    """One finding of doctor."""

    subject: str
    grade: Grade
    found: str
    do: str = ""
    """What to do about it; '' where nothing."""


def look(run: RunFile | None, run_root: Path) -> Iterator[Row]:
    """Everything that can be seen from here without a scheduler."""
    yield from check_python(sys.version_info[:2])
    yield from check_packages(run)
    yield from check_clashes(sys.path, run)
    yield check_disk("run root", run_root)
    if run is not None and run.checkpoint.dir:
        yield check_disk("checkpoints", Path(run.checkpoint.dir))
    if run is not None and run.notify.webhook_file:
        wrong = check_secret_file(Path(run.notify.webhook_file))
        yield Row(subject="webhook file", grade=Grade.UNFIT if wrong else Grade.OK, found=wrong or "0600")
    yield from check_secrets(run_root)


# ---------------------------------------------------------------- packages


_TESTED: Final = {"torch": ("2.13",), "megatron-core": ("0.16",), "numpy": ("2.",)}
"""Beginnings of the versions that the tests ran with."""


def check_python(version: tuple[int, ...]) -> Iterator[Row]:
    text = ".".join(map(str, version))
    if version < (3, 11):
        yield Row(subject="python", grade=Grade.UNFIT, found=text, do="use Python 3.11 or newer")
    elif version == (3, 11):
        yield Row(subject="python", grade=Grade.OK, found=text)
    else:
        yield Row(subject="python", grade=Grade.NOTE, found=f"{text}; the tests ran with 3.11")


def check_packages(run: RunFile | None) -> Iterator[Row]:
    """Versions beside those tested. What a run does not need is only a note."""
    needed = {"reference": ("torch", "megatron-core", "numpy"), "megatron_lm": ("torch", "numpy")}
    must = needed.get(run.task.kind, ()) if run is not None and not run.task.container else ()
    for package, tested in _TESTED.items():
        version = _version(package)
        if not version:
            grade = Grade.UNFIT if package in must else Grade.NOTE
            do = f"pip install 'outlast[megatron]' (it brings {package})" if package in must else ""
            yield Row(subject=package, grade=grade, found="not installed here", do=do)
        elif version.startswith(tested):
            yield Row(subject=package, grade=Grade.OK, found=version)
        else:
            do = "rehearse first: outlast demo"
            yield Row(subject=package, grade=Grade.WARNING, found=f"{version}; tested: {', '.join(tested)}", do=do)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_clashes(path: Sequence[str], run: RunFile | None) -> Iterator[Row]:
    """Another package of our name on sys.path or beside the user's script would be imported in place of ours."""
    ours = Path(__file__).resolve().parents[2]
    places = [Path(place or ".") for place in path]
    if run is not None and run.task.script:
        places.insert(0, (Path(run.task.workdir) / run.task.script).parent)
    elif run is not None and run.task.module:
        places.insert(0, Path(run.task.workdir or "."))
    spots = [spot for place in places for spot in (place / "outlast" / "__init__.py", place / "outlast.py")]
    strangers = []
    for spot in dict.fromkeys(spots):
        if spot.is_file() and _is_ours(spot.parent, ours):
            break  # what comes later on the path hides nothing
        if spot.is_file():
            strangers.append(spot)
    for spot in strangers:
        do = "rename it, or start the program from elsewhere: ranks import outlast by this name"
        yield Row(subject="name clash", grade=Grade.UNFIT, found=f"{spot} hides outlast", do=do)
    if not strangers:
        yield Row(subject="name clash", grade=Grade.OK, found="nothing hides outlast")
    theirs = [spot for place in places for spot in (place / "slurm" / "__init__.py", place / "slurm.py")]
    for spot in dict.fromkeys(theirs):
        if spot.is_file() and spot.resolve().parent != ours / "slurm":
            yield Row(subject="name clash", grade=Grade.NOTE, found=f"{spot}: harmless, ours is outlast.slurm")


def _is_ours(package: Path, ours: Path) -> bool:
    return (package / "reliability").resolve().parent == ours


# ---------------------------------------------------------------- file system


def check_disk(subject: str, place: Path, *, probe_bytes: int = PROBE_BYTES) -> Row:
    """Write, fsync, rename and link, as the run directory needs them; speed and room. Makes no directory."""
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        free_bytes = shutil.disk_usage(place).free
        # never fill up a disk by asking whether it is full
        speed = _probe(place, min(probe_bytes, free_bytes // 100))
    except OSError as error:
        do = "name a directory of yours on a file system that all nodes see (run_root, checkpoint.dir)"
        return Row(subject=subject, grade=Grade.UNFIT, found=f"{place}: {error.strerror or error}", do=do)
    found = f"{place}: {speed / 1e9:.2f} GB/s write, {free_bytes / 1e9:,.0f} GB free"
    if free_bytes < _LITTLE_BYTES:
        return Row(subject=subject, grade=Grade.WARNING, found=found, do="make room, or lower checkpoint.keep_last")
    if speed < _SLOW_BYTES_PER_S:
        return Row(subject=subject, grade=Grade.WARNING, found=found, do="saves will take long: a faster file system")
    return Row(subject=subject, grade=Grade.OK, found=found)


def _probe(place: Path, size_bytes: int) -> float:
    """Bytes a second written through fsync. Raises OSError where write, rename or link is refused."""
    first, second = (place / f".outlast-doctor-{os.getpid()}.{n}" for n in (1, 2))
    block = os.urandom(1024 * 1024)
    begun_s = time.monotonic()
    try:
        with first.open("wb") as file:
            for _ in range(max(1, size_bytes // len(block))):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        took_s = time.monotonic() - begun_s
        os.rename(first, second)
        os.link(second, first)  # epochs are taken by link: the one exclusive creation that holds on NFS
        if first.stat().st_nlink < 2:
            raise OSError(0, "link(2) does not make hard links here, and supervisors fence each other with them")
        return first.stat().st_size / max(took_s, 1e-6)
    finally:
        first.unlink(missing_ok=True)
        second.unlink(missing_ok=True)


def check_secrets(run_root: Path) -> Iterator[Row]:
    """The link secrets of the runs that are there: others' eyes on one are others' hands on the ranks."""
    open_ones = [secret for secret in _secrets(run_root) if secret.stat().st_mode & 0o077]
    for secret in open_ones:
        do = f"chmod 600 {secret}, and end that run: the secret may be known"
        yield Row(subject="secret", grade=Grade.UNFIT, found=f"{secret} can be read by others", do=do)
    if not open_ones:
        yield Row(subject="secrets", grade=Grade.OK, found="all 0600")


def _secrets(run_root: Path) -> Iterable[Path]:
    return (path for path in sorted(run_root.glob("*/secret")) if re.search(r"-[0-9]{4,9}$", path.parent.name))
