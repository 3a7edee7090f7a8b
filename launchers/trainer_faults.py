"""Faults on purpose: what a rank does to itself at a given train_step, so that a test or demo breaks where it says.

    OUTLAST_FAULT="exception:rank=1:train_step=25:once=/path/marker; slow:rank=0:train_step=3:seconds=0.2"

Parsed strictly: a fault with a typing error that silently never fired would make a test pass for nothing. `once` is
last in its fault (a path may hold colons) and names a marker file, made with exclusive creation: over all attempts and
ranks the fault fires once. Without it, the fault fires in every attempt that reaches the train_step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outlast.launchers.trainer_args import TrainerError

_NUMBERS: Final = {"rank": int, "train_step": int, "seconds": float, "megabytes": int}
_WANTS: Final = {
    "exception": (),
    "exit": ("code",),
    "sigkill": (),
    "sigstop": (),
    "loop": (),
    "slow": ("seconds",),
    "flood": ("megabytes",),
}
"""Kind -> what it needs besides rank and train_step."""


class FaultError(TrainerError):
    """OUTLAST_FAULT does not say what it should."""


class InjectedFault(RuntimeError):
    """The plain exception of kind `exception`."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    kind: str
    rank: int
    train_step: int
    """Fires just before this train_step is computed; `slow` from it on."""
    once: Path | None = None
    code: int = 0
    seconds: float = 0.0
    megabytes: int = 0


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Faults from the environment variable's text; '' gives none."""
    return tuple(_parse_fault(part.strip()) for part in text.split(";") if part.strip())


def _parse_fault(text: str) -> Fault:
    head, _, once = text.partition(":once=")
    kind, *fields = head.split(":")
    if kind not in _WANTS:
        raise FaultError(f"OUTLAST_FAULT {text!r}: no such kind {kind!r}; there are {', '.join(sorted(_WANTS))}")
    if kind == "exit" and fields:
        fields[0] = f"code={fields[0]}"
    found: dict[str, float] = {}
    for field in fields:
        name, _, value = field.partition("=")
        if name in found:
            raise FaultError(f"OUTLAST_FAULT {text!r}: {name} is given twice")
        found[name] = _parse_number(text, name, value)
    wanted = {"rank", "train_step", *_WANTS[kind]}
    if set(found) != wanted:
        raise FaultError(
            f"OUTLAST_FAULT {text!r}: has {sorted(found)}, {kind} takes {sorted(wanted)} (and, last, once=PATH)"
        )
    if text.endswith(":once="):
        raise FaultError(f"OUTLAST_FAULT {text!r}: once= names no file")
    if not 0 <= found.get("code", 0) <= 255:
        raise FaultError(f"OUTLAST_FAULT {text!r}: exit code {found['code']:.0f}, expected 0 .. 255")
    return Fault(
        kind=kind,
        rank=int(found["rank"]),
        train_step=int(found["train_step"]),
        once=Path(once) if once else None,
        code=int(found.get("code", 0)),
        seconds=found.get("seconds", 0.0),
        megabytes=int(found.get("megabytes", 0)),
    )


def _parse_number(text: str, name: str, value: str) -> float:
    read = _NUMBERS.get(name, int if name == "code" else None)
    if read is None:
        raise FaultError(f"OUTLAST_FAULT {text!r}: no such field {name!r}; there are {', '.join(sorted(_NUMBERS))}")
    try:
        number = float(read(value))
    except ValueError as error:
        raise FaultError(f"OUTLAST_FAULT {text!r}: {name} is {value!r}, expected a number") from error
    if not 0 <= number < float("inf"):
        raise FaultError(f"OUTLAST_FAULT {text!r}: {name} is {value}, expected a finite number >= 0")
    return number


def due(fault: Fault, *, rank: int, train_step: int) -> bool:
    """Whether this fault is this rank's, now. `slow` stays due; the others have their one train_step."""
    at_step = train_step >= fault.train_step if fault.kind == "slow" else train_step == fault.train_step
    return fault.rank == rank and at_step


def inject(faults: tuple[Fault, ...], *, rank: int, train_step: int) -> None:
    """Commit the faults that are due. Most of them do not return."""
    for fault in faults:
        if due(fault, rank=rank, train_step=train_step) and (fault.once is None or _claim(fault.once)):
            _commit(fault)


def _claim(marker: Path) -> bool:
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def _commit(fault: Fault) -> None:
    match fault.kind:
        case "exception":
            raise InjectedFault(f"injected before train_step {fault.train_step}")
        case "exit":
            sys.stdout.flush()
            os._exit(fault.code)
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sigstop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "loop":
            _spin_outside_collectives()
        case "slow":
            time.sleep(fault.seconds)
        case "flood":
            _flood(fault.megabytes)
        case _:
            raise FaultError(f"fault kind {fault.kind!r} has no act")


def _spin_outside_collectives() -> None:
    while True:
        time.sleep(0.002)  # a hang to its watchers, yet the test's machine stays usable


def _flood(megabytes: int) -> None:
    line = "flood " * 170 + "\n"
    for _ in range(megabytes * 1_000_000 // len(line)):
        sys.stdout.write(line)
    sys.stdout.flush()
