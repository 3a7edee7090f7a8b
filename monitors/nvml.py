"""One node's GPUs through NVML, live: XID events, states that change, and the library's silence as a signal of its own.

    nvml_child.py (its calls may hang)  --pipe, deadlines-->  XidSeen | GpuChanged | SourceBlind

It never hangs with the library: the child is killed when it is late, and where not even that ends it, no other is
started beside it. Blindness is said once, and is never health. NVML's XIDs are those of the kernel log without their
text, so each is seen twice where both are read; that is one event to whoever folds them. It reports and never judges.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

import msgspec

from outlast.monitors.gpu_state import GpuState, changes, merged
from outlast.monitors.nvml_words import EventsAlive, GpusSaid, NoEvents, NoNvml, Said, XidSaid
from outlast.reliability.model import GpuChanged, Node, SourceBlind, XidSeen

SOURCE: Final = "nvml"
POLL_S: Final = 10.0
ANSWER_S: Final = 15.0
"""A state or an event wait that takes longer hangs: healthy calls take milliseconds, a busy driver seconds."""
FIRST_RETRY_S: Final = 1.0
LAST_RETRY_S: Final = 60.0
LINE_BYTES: Final = 1 << 20

Found = XidSeen | GpuChanged | SourceBlind
_decoder: Final[msgspec.json.Decoder[Said]] = msgspec.json.Decoder(Said)


class GpuWatch:
    """`async for found in GpuWatch(node).signals()`. Ends by itself only where NVML is not installed."""

    def __init__(
        self,
        node: Node,
        *,
        poll_s: float = POLL_S,
        answer_s: float = ANSWER_S,
        clock: Callable[[], float] = time.time,
        began: Callable[[int], object] = lambda pid: None,
        over: Callable[[int], object] = lambda pid: None,
    ) -> None:
        """`began` and `over` are told the child's pid: it is a helper of an agent, and no rank."""
        self._node, self._poll_s, self._answer_s, self._clock = node, poll_s, answer_s, clock
        self._began, self._over = began, over
        self._states: dict[str, GpuState] = {}
        self._said = ""
        self._well = False
        """The present child has told states."""
        self._gone = False

    async def signals(self) -> AsyncIterator[Found]:
        retry_s = FIRST_RETRY_S
        while not self._gone:
            child = await self._start()
            if isinstance(child, str):
                for found in self._blind(child):
                    yield found
            else:
                try:
                    async for found in self._listen(child):
                        yield found
                finally:
                    stuck = await self._end(child)
                while stuck and child.returncode is None:
                    # killed and still there: it waits inside the driver, and so would the next
                    await asyncio.sleep(retry_s)
                self._over(child.pid)
            if self._gone:
                return
            retry_s = FIRST_RETRY_S if self._well else min(LAST_RETRY_S, retry_s * 2)
            await asyncio.sleep(retry_s)

    def state(self, gpu: str) -> GpuState | None:
        """What is known of a GPU, for whoever wants more than changes."""
        return self._states.get(gpu)

    async def _start(self) -> asyncio.subprocess.Process | str:
        words = [sys.executable, "-P", "-m", "outlast.monitors.nvml_child", f"{self._poll_s:g}"]
        self._well = False
        try:
            child = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=LINE_BYTES,
            )
        except OSError as e:
            return f"cannot start its reader: {e.strerror}"
        self._began(child.pid)
        return child

    async def _listen(self, child: asyncio.subprocess.Process) -> AsyncIterator[Found]:
        """Until the child ends or is late with one of its two kinds of news."""
        assert child.stdout is not None
        due = _Due(self._poll_s, self._answer_s)
        while True:
            line, why = await _read_line(child.stdout, due)
            if why:
                for found in self._blind(why, hung=due.late):
                    yield found
                return
            try:
                said = _decoder.decode(line)
            except msgspec.MsgspecError:
                continue  # the end of a child that was killed in the middle of a line
            due.heard(said)
            for found in self._take(said):
                yield found
            if isinstance(said, NoNvml):
                return

    def _take(self, said: Said) -> list[Found]:
        at_s = self._clock()
        match said:
            case GpusSaid(gpus=gpus):
                if not self._well:
                    self._well, self._said = True, ""
                found: list[Found] = []
                for state in gpus:
                    before = self._states.get(state.gpu)
                    found += changes(before, state, node=self._node, at_s=at_s, source=SOURCE)
                    self._states[state.gpu] = merged(before, state)
                return found
            case XidSaid(gpu=gpu, code=code, instance=instance):
                text = f"NVML event: XID {code}" + (f" on GPU instance {instance}" if instance else "")
                return [XidSeen(node=self._node, at_s=at_s, code=code, gpu=gpu or None, source=SOURCE, text=text)]
            case EventsAlive():
                return []
            case NoEvents(why=why):
                return self._blind(f"no XID events: {why}")
            case NoNvml(why=why, ever=ever):
                self._gone = not ever
                return self._blind(f"no NVML: {why}")

    def _blind(self, why: str, *, hung: bool = False) -> list[Found]:
        """Said once, not at each try."""
        if why == self._said:
            return []
        self._said = why
        return [SourceBlind(node=self._node, at_s=self._clock(), source=SOURCE, why=why, hung=hung)]

    async def _end(self, child: asyncio.subprocess.Process) -> bool:
        """Kill it; True where that did not end it soon."""
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await child.wait()
        return child.returncode is None


class _Due:
    """When the child's two threads are late."""

    def __init__(self, poll_s: float, answer_s: float) -> None:
        self._poll_s, self._answer_s = poll_s, answer_s
        # the first answer also pays for the child's start
        self._states = self._events = time.monotonic() + poll_s + 2 * answer_s

    def heard(self, said: Said) -> None:
        match said:
            case GpusSaid():
                self._states = time.monotonic() + self._poll_s + self._answer_s
            case XidSaid() | EventsAlive():
                self._events = time.monotonic() + 1.0 + self._answer_s
            case NoEvents():
                self._events = float("inf")
            case NoNvml():
                pass

    @property
    def left_s(self) -> float:
        return min(self._states, self._events) - time.monotonic()

    @property
    def late(self) -> bool:
        return self.left_s <= 0

    @property
    def why(self) -> str:
        what = "states" if self._states <= self._events else "events"
        return f"NVML hangs: no {what} within {self._answer_s:g} s"


async def _read_line(stream: asyncio.StreamReader, due: _Due) -> tuple[bytes, str]:
    """(a line, '') or why there is none."""
    try:
        async with asyncio.timeout(max(0.0, due.left_s)):
            line = await stream.readline()
    except TimeoutError:
        return b"", due.why
    except ValueError:
        return b"", "its reader said a line without end"
    return line, "" if line else "its reader ended"
