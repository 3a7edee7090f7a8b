"""Files of yesterday as timed signals: kernel logs in any form, Slurm's records. An edge: it reads, nothing else.

    kernel log -> lines that can matter -> time and node of the line -> the decoder that agents use -> Fed
    slurmctld.log, sacct                -> jobs, node states                                       -> Fed

Files are read as streams, so that their size does not matter, and merged by the lines' times.
"""

from __future__ import annotations

import gzip
import heapq
import io
import json
import lzma
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final, cast

from outlast.monitors.kernel_text import parse_kernel_line
from outlast.monitors.kmsg import KernelDecoder
from outlast.monitors.sieve import CHUNK_BYTES, marked, whole_lines
from outlast.reliability.findings import ConfigError, Finding
from outlast.reliability.model import AgentLost, Node, NodeState
from outlast.reliability.replaying import Fed, JobSpan
from outlast.slurm.errors import SlurmError
from outlast.slurm.past import ControllerLog, JobPast, is_controller_log, parse_past

SACCT_BYTES: Final = 256 << 20
NODES_MAX: Final = 100_000
_DAY_S: Final = 86400.0
_JOURNAL: Final = frozenset(
    (
        *("MESSAGE", "SYSLOG_IDENTIFIER", "_TRANSPORT", "__REALTIME_TIMESTAMP", "_SOURCE_MONOTONIC_TIMESTAMP"),
        *("_HOSTNAME", "SYSLOG_FACILITY", "PRIORITY"),
    )
)


@dataclass
class Counts:
    """What was read, for a person who wonders why nothing was found."""

    lines: int = 0
    signals: int = 0
    nameless: int = 0
    """Signals on lines that name no node."""
    first_s: float | None = None
    last_s: float | None = None
    nameless_in: str = ""


@dataclass
class Names:
    """Node names as Slurm has them: logs often carry the full host name."""

    known: set[str] = field(default_factory=set)

    def of(self, host: str) -> Node:
        if host in self.known:
            return Node(host)
        short = host.partition(".")[0]
        return Node(short if short in self.known or not self.known else host)


class KernelFile:
    """One kernel log. `NODE=FILE`, or a file whose lines name their host."""

    def __init__(self, word: str, names: Names, counts: Counts) -> None:
        node, equals, rest = word.partition("=")
        named = bool(equals) and not Path(word).exists()
        self.path = Path(rest if named else word)
        self._node = Node(node) if named else None
        self._names, self._counts = names, counts
        self._decoders: dict[Node, KernelDecoder] = {}
        self._end_s, self._boot_s, self._year = self._times()
        self._at_s = 0.0
        if self._node:
            names.known.add(self._node)

    def read(self) -> Iterator[Fed]:
        """Signals in the order of the file; time never runs backwards in it."""
        with open_log(self.path) as source:
            head = source.peek(64)[:64]  # type: ignore[attr-defined]
            lines = _entries(source) if head.startswith((b"__CURSOR=", b"__REALTIME_TIMESTAMP=")) else _lines(source)
            for number, raw in lines:
                self._counts.lines = max(self._counts.lines, number)
                yield from self._signals(number, raw)

    def _signals(self, number: int, raw: bytes) -> Iterator[Fed]:
        line = parse_kernel_line(raw.decode("utf-8", "replace"), year=self._year)
        at_s = self._time(line.at_s, line.uptime_s)
        node = self._node or (self._names.of(line.node) if line.node else None)
        known = Node("") if node is None else node
        decoder = self._decoders.get(known)
        if decoder is None:
            if len(self._decoders) >= NODES_MAX:
                return
            decoder = self._decoders[known] = KernelDecoder(known, "kernel_log")
        counts = self._counts
        for found in decoder.line(raw, at_s):
            where = f"{self.path}:{number}"
            if node is None:
                counts.nameless, counts.nameless_in = counts.nameless + 1, counts.nameless_in or where
                continue
            counts.signals += 1
            counts.first_s = at_s if counts.first_s is None else min(counts.first_s, at_s)
            counts.last_s = at_s if counts.last_s is None else max(counts.last_s, at_s)
            yield Fed(at_s=at_s, signal=found, source=where)

    def _time(self, at_s: float | None, uptime_s: float | None) -> float:
        if at_s is None and uptime_s is not None:
            at_s = self._boot_s + uptime_s
        elif at_s is not None and at_s > self._end_s + _DAY_S and self._year is not None:
            at_s -= 365.25 * _DAY_S  # December's lines in January's file
        if at_s is not None and at_s <= self._end_s + _DAY_S:
            self._at_s = max(self._at_s, at_s)
        elif not self._at_s:
            self._at_s = self._end_s
        return self._at_s

    def _times(self) -> tuple[float, float, int]:
        """When the file ended, when its node booted (by the last line that says how long it was up), and the year."""
        try:
            end_s = self.path.stat().st_mtime
            last = _tail(self.path)
        except OSError as error:
            raise ConfigError([Finding(source=str(self.path), text=error.strerror or "cannot be read")]) from None
        uptimes = [u for raw in last if (u := parse_kernel_line(raw.decode("utf-8", "replace")).uptime_s) is not None]
        return end_s, end_s - (uptimes[-1] if uptimes else 0.0), time.gmtime(end_s).tm_year


def open_log(path: Path) -> BinaryIO:
    """A log as it lies there, packed ones unpacked. ConfigError where it cannot be opened."""
    try:
        if path.suffix == ".gz":
            return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, gzip.open(path, "rb"))))
        if path.suffix == ".xz":
            return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, lzma.open(path, "rb"))))
        return path.open("rb")
    except OSError as error:
        raise ConfigError([Finding(source=str(path), text=error.strerror or "cannot be read")]) from None


def _chunks(source: BinaryIO) -> Iterator[bytes]:
    while chunk := source.read(CHUNK_BYTES):
        yield chunk


def _lines(source: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines that can matter, each with its number from 1."""
    before = 0
    for chunk in whole_lines(_chunks(source)):
        at, number = 0, before
        for start in sorted(marked(chunk)):
            number += chunk.count(b"\n", at, start)
            at = start
            end = chunk.find(b"\n", start)
            yield number + 1, chunk[start : end if end >= 0 else len(chunk)]
        before += chunk.count(b"\n")


def _entries(source: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """journald's export form, an entry of several lines each, as one JSON line each: what the line parser reads."""
    fields: dict[str, str] = {}
    number = 0
    for chunk in whole_lines(_chunks(source)):
        for raw in chunk.split(b"\n")[:-1]:
            number += 1
            if not raw:
                if "MESSAGE" in fields:
                    yield number, json.dumps(fields).encode()
                fields = {}
                continue
            name, _, value = raw.partition(b"=")
            key = name.decode("ascii", "replace")
            if key in _JOURNAL:
                fields[key] = value.decode("utf-8", "replace")
    if "MESSAGE" in fields:
        yield number, json.dumps(fields).encode()


def _tail(path: Path) -> list[bytes]:
    if path.suffix in (".gz", ".xz"):
        return []
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
        return file.read().split(b"\n")[-200:]


class SlurmPast:
    """What the Slurm files tell: jobs, and node states by time."""

    def __init__(self, paths: Iterable[Path], *, silent_s: float) -> None:
        self._jobs: list[JobPast] = []
        self._states: list[Fed] = []
        self._silent_s = silent_s
        for path in paths:
            self._read(path)

    def jobs(self) -> tuple[JobSpan, ...]:
        return tuple(
            JobSpan(job=j.job, nodes=j.nodes, start_s=j.start_s, end_s=j.end_s, state=j.state)
            for j in self._jobs
            if j.nodes
        )

    def signals(self) -> Iterator[Fed]:
        return iter(sorted(self._states, key=lambda f: f.at_s))

    def _read(self, path: Path) -> None:
        with open_log(path) as source:
            head = source.peek(8192)[:8192]  # type: ignore[attr-defined]
            if not is_controller_log(head.decode("utf-8", "replace").splitlines()[:-1]):
                try:
                    self._jobs += parse_past(source.read(SACCT_BYTES).decode("utf-8", "replace"))
                except SlurmError as error:
                    text = f"{error}; or give slurmctld's own log"
                    raise ConfigError([Finding(source=str(path), text=text)]) from None
                return
            log = ControllerLog()
            for number, raw in enumerate(islice(_every_line(source), 100_000_000), start=1):
                for state in log.read(raw.decode("utf-8", "replace")):
                    self._add(state, f"{path}:{number}")
            self._jobs += log.jobs

    def _add(self, state: NodeState, source: str) -> None:
        self._states.append(Fed(at_s=state.at_s, signal=state, source=source))
        if state.state == "down":
            lost = AgentLost(node=state.node, at_s=state.at_s, silent_s=self._silent_s, why=f"Slurm: {state.reason}")
            self._states.append(Fed(at_s=state.at_s, signal=lost, source=source))


def _every_line(source: BinaryIO) -> Iterator[bytes]:
    for chunk in whole_lines(_chunks(source)):
        yield from chunk.split(b"\n")[:-1]


def by_time(streams: Iterable[Iterator[Fed]]) -> Iterator[Fed]:
    return heapq.merge(*streams, key=lambda f: f.at_s)
