"""The step record page: what one rank is doing, in 4 KiB of shared memory that its agent reads.

    rank: StepWriter --mmap--> /dev/shm/.../rank-00012 <--pread-- StepReader :agent

A sequence lock (odd while the writer is inside) and a CRC: a reader never stops a writer, and a page that is torn,
truncated or garbage reads as None, never as numbers. The CRC makes the lock sound on machines that reorder stores.
The writer never raises into training and never waits: it writes through mmap, since a plain write(2) would give up
the interpreter lock and could wait milliseconds for it. Times are CLOCK_MONOTONIC of the node.
It is not a log: the ring holds the last 32 finished train_steps, and the agent reads once a second.
Standard library alone: it runs inside the user's program before anything else is imported.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PHASES: Final = ("", "init", "load", "compile", "train", "eval", "save", "idle")
"""In the order of a rank's life; '' before it said anything."""

PAGE_BYTES: Final = 4096
RING_STEPS: Final = 32
NO_STEP: Final = -1

_MAGIC: Final = b"OUTLSTEP"
_VERSION: Final = 2
# magic, version, crc of the body, sequence
_HEAD: Final = struct.Struct("<8sIIQ")
# phase, phase_since, train_step, started, durable_step, durable_s, pid, finished steps ever, node
_STATE: Final = struct.Struct("<QdqdqdqQ64s")
# train_step, end, step, compute, wait, data, tokens, loss, grad_norm, samples from, to, save, local_hash, known
_STEP: Final = struct.Struct("<qdddddqddqqdQQ")
_BODY_BYTES: Final = _STATE.size + RING_STEPS * _STEP.size
_LOSS_KNOWN: Final = 1
_GRAD_KNOWN: Final = 2
_OPEN: Final = 4
_SAVE_AT: Final = 11
"""Place of save in _STEP; the bits are its last."""
_READ_TRIES: Final = 8


@dataclass(frozen=True, kw_only=True)
class StepEntry:
    """One finished train_step."""

    train_step: int
    end_mono_s: float
    step_s: float
    compute_s: float = 0.0
    wait_s: float = 0.0
    data_s: float = 0.0
    tokens: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    samples_from: int = -1
    samples_to: int = -1
    save_s: float = 0.0
    local_hash: int = 0
    closed: bool = True
    """False: a save of it may be going on, which save_s does not hold yet."""


@dataclass(frozen=True, kw_only=True)
class StepPage:
    """One consistent reading of a page."""

    phase: str
    phase_since_mono_s: float
    train_step: int
    """The last finished one; -1 before the first."""
    started_mono_s: float
    """When the step in flight began; 0.0 between steps."""
    durable_step: int
    durable_s: float = 0.0
    """From the beginning of that save to its commit marker; 0.0 where the program does not say."""
    pid: int
    node: str
    steps: tuple[StepEntry, ...]
    """Oldest first."""

    @property
    def moved_mono_s(self) -> float:
        """When it last finished a train_step or changed phase."""
        return max(self.phase_since_mono_s, self.steps[-1].end_mono_s if self.steps else 0.0)


def create_page(path: Path) -> None:
    """Make the file with its memory reserved, so that a full /dev/shm fails here and not as SIGBUS in a rank."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, PAGE_BYTES)
    finally:
        os.close(fd)


class StepWriter:
    """The rank's side. Safe from any thread and from posix_signal handlers; silent in forked children."""

    def __init__(self, path: Path, *, node: str = "") -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._page = mmap.mmap(fd, PAGE_BYTES)
        finally:
            os.close(fd)
        self._pid = os.getpid()
        self._node = node.encode(errors="replace")[:64]
        self._phase, self._phase_since = 0, time.monotonic()
        self._train_step = self._durable = NO_STEP
        self._started = self._last_end = self._durable_s = 0.0
        self._count = self._seq = 0
        self._body = bytearray(_BODY_BYTES)
        self._lock = threading.Lock()
        self._dirty = False
        self._publish()

    def phase(self, name: str) -> None:
        """Enter a phase; an unknown name counts as idle."""
        self._phase = PHASES.index(name) if name in PHASES else PHASES.index("idle")
        self._phase_since = time.monotonic()
        self._publish()

    def step_started(self, train_step: int) -> None:
        """train_step is 1-based: the one that is now being computed."""
        self._close()
        self._started = time.monotonic()
        if self._phase != PHASES.index("train"):
            self._phase, self._phase_since = PHASES.index("train"), self._started
        self._publish()

    def step_done(
        self,
        train_step: int,
        *,
        loss: float | None = None,
        grad_norm: float | None = None,
        samples_from: int = -1,
        samples_to: int = -1,
        tokens: int = 0,
        save_s: float = 0.0,
        compute_s: float = 0.0,
        wait_s: float = 0.0,
        data_s: float = 0.0,
        local_hash: int = 0,
        closed: bool = True,
    ) -> None:
        """A train_step is finished. save_s: how long the loop stood still for a save since step_started.

        Call it before a save of this very step, with closed=False, and step_closed after: a checkpoint of a step that
        nobody heard of would leave a hole in the record where the rank dies while it saves.
        """
        self._close()
        try:
            now = time.monotonic()
            began = self._started or self._last_end or self._phase_since
            step_s = max(0.0, now - began - save_s)
            known = (_LOSS_KNOWN if loss is not None else 0) | (_GRAD_KNOWN if grad_norm is not None else 0)
            known |= 0 if closed else _OPEN
            at = _STATE.size + (self._count % RING_STEPS) * _STEP.size
            times = (now, step_s, compute_s, wait_s, data_s)
            seen = (int(tokens), _number(loss), _number(grad_norm), samples_from, samples_to, save_s)
            _STEP.pack_into(self._body, at, train_step, *times, *seen, local_hash & (2**64 - 1), known)
        except (struct.error, TypeError, ValueError, OverflowError):
            return  # a number that does not fit is not worth a training run
        self._count += 1
        self._train_step, self._started, self._last_end = train_step, 0.0, now
        self._publish()

    def step_closed(self, save_s: float = 0.0) -> None:
        """All of the last step_done is over; the loop stood still for a save of it for save_s, since then."""
        self._close(save_s)
        self._last_end = time.monotonic()
        self._publish()

    def checkpoint_durable(self, train_step: int, durable_s: float = 0.0) -> None:
        """The commit marker of this train_step's checkpoint is on disk, durable_s after the save began."""
        if train_step >= self._durable:
            self._durable, self._durable_s = train_step, durable_s
        self._publish()

    def _close(self, save_s: float = 0.0) -> None:
        """Where the newest step is still open."""
        at = _STATE.size + ((self._count - 1) % RING_STEPS) * _STEP.size
        entry = list(_STEP.unpack_from(self._body, at))
        if not entry[-1] & _OPEN:
            return
        with contextlib.suppress(TypeError):  # see step_done
            entry[_SAVE_AT] += max(0.0, save_s)
        entry[-1] &= ~_OPEN
        _STEP.pack_into(self._body, at, *entry)

    def _publish(self) -> None:
        """Write the page; where another thread is writing (or this one, below a handler), that one writes again."""
        self._dirty = True
        while self._dirty and self._lock.acquire(blocking=False):
            try:
                self._dirty = False
                if os.getpid() == self._pid:
                    self._write()
            except (struct.error, TypeError, ValueError, OverflowError):
                pass  # see step_done; ValueError also where the interpreter has closed the map at exit
            finally:
                self._lock.release()

    def _write(self) -> None:
        state = (self._phase, self._phase_since, self._train_step, self._started, self._durable, self._durable_s)
        _STATE.pack_into(self._body, 0, *state, self._pid, self._count, self._node)
        seq = self._seq + 2
        _HEAD.pack_into(self._page, 0, _MAGIC, _VERSION, 0, seq - 1)
        self._page[_HEAD.size : _HEAD.size + _BODY_BYTES] = bytes(self._body)
        _HEAD.pack_into(self._page, 0, _MAGIC, _VERSION, zlib.crc32(self._body), seq)
        self._seq = seq


class StepReader:
    """The agent's side: pread, not mmap, so that a truncated file cannot kill the agent."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self) -> StepPage | None:
        """The page now; None before the rank's first word, or where no sound page could be read."""
        for _ in range(_READ_TRIES):
            try:
                raw = os.pread(self._fd, PAGE_BYTES, 0)
            except OSError:
                return None
            page = parse_page(raw)
            if page is not None:
                return page
            if not raw.startswith(_MAGIC):
                return None
        return None


def parse_page(raw: bytes) -> StepPage | None:
    """A page from bytes; None unless magic, version, lock and CRC all hold and the numbers make sense."""
    if len(raw) < _HEAD.size + _BODY_BYTES:
        return None
    magic, version, crc, seq = _HEAD.unpack_from(raw)
    body = raw[_HEAD.size : _HEAD.size + _BODY_BYTES]
    if magic != _MAGIC or version != _VERSION or seq % 2 or zlib.crc32(body) != crc:
        return None
    phase, since, train_step, started, durable, durable_s, pid, count, node = _STATE.unpack_from(body)
    if phase >= len(PHASES) or not math.isfinite(since):
        return None
    first = max(0, count - RING_STEPS)
    return StepPage(
        phase=PHASES[phase],
        phase_since_mono_s=since,
        train_step=train_step,
        started_mono_s=started,
        durable_step=durable,
        durable_s=durable_s if math.isfinite(durable_s) else 0.0,
        pid=pid,
        node=node.rstrip(b"\0").decode(errors="replace"),
        steps=tuple(_parse_step(body, i % RING_STEPS) for i in range(first, count)),
    )


def _parse_step(body: bytes, slot: int) -> StepEntry:
    step, end, step_s, compute, wait, data, tokens, loss, grad, s_from, s_to, save, local_hash, known = (
        _STEP.unpack_from(body, _STATE.size + slot * _STEP.size)
    )
    return StepEntry(
        train_step=step,
        end_mono_s=end,
        step_s=step_s,
        compute_s=compute,
        wait_s=wait,
        data_s=data,
        tokens=tokens,
        loss=loss if known & _LOSS_KNOWN else None,
        grad_norm=grad if known & _GRAD_KNOWN else None,
        samples_from=s_from,
        samples_to=s_to,
        save_s=save,
        local_hash=local_hash,
        closed=not known & _OPEN,
    )


def _number(value: float | None) -> float:
    return 0.0 if value is None else float(value)
