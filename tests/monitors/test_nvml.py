"""NVML live: the unmodified binding on a compiled stand-in, in a child that may hang, die or never start."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.monitors.gpu_state import COUNTERS, FACTS, GpuState, changes, merged, restarted
from outlast.monitors.nvml import Found, GpuWatch
from outlast.monitors.nvml_words import Said
from outlast.reliability.model import GpuChanged, Node, SourceBlind, XidSeen

T = TypeVar("T")
NODE = Node("n1")


class Watched:
    """A watch that runs beside a test."""

    def __init__(self, watch: GpuWatch) -> None:
        self.watch = watch
        self.found: list[Found] = []
        self.started: list[int] = []
        self.over = False

    async def listen(self) -> None:
        async for found in self.watch.signals():
            self.found.append(found)
        self.over = True

    async def until(self, what: Callable[[], T | bool | None], limit_s: float = 20.0) -> T | bool:
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if got := what():
                return got
            await asyncio.sleep(0.02)
        pytest.fail(f"waited {limit_s} s in vain; found {self.found}")

    def changed(self, field: str) -> list[tuple[str, int | None, int]]:
        return [(f.gpu, f.before, f.now) for f in self.found if isinstance(f, GpuChanged) and f.field == field]

    def codes(self) -> list[tuple[int, str | None]]:
        return [(f.code, f.gpu) for f in self.found if isinstance(f, XidSeen)]

    def blind(self) -> list[str]:
        return [f.why for f in self.found if isinstance(f, SourceBlind)]


def play(
    fake: Any, story: Callable[[Watched], Awaitable[None]], *, poll_s: float = 0.1, answer_s: float = 10.0, **env: str
) -> Watched:
    """Run a watch with this environment while the story goes on; afterwards nothing of it may be left."""
    ended: list[int] = []
    watch = GpuWatch(NODE, poll_s=poll_s, answer_s=answer_s, over=ended.append)
    watched = Watched(watch)
    watch._began = watched.started.append

    async def main() -> None:
        task = asyncio.create_task(watched.listen())
        try:
            await story(watched)
        finally:
            task.cancel()
            await asyncio.wait([task], timeout=10)

    before = dict(os.environ)
    os.environ.update(fake.env(**env))
    try:
        asyncio.run(main())
    finally:
        os.environ.clear()
        os.environ.update(before)
    for pid in watched.started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    return watched


@pytest.mark.slow
def test_xid_events_come_with_their_gpu(nvml: Any) -> None:
    async def story(watched: Watched) -> None:
        await watched.until(lambda: watched.watch.state("0000:1b:00"))
        # GPUs are registered by another thread than the one that reads states
        await watched.until(lambda: nvml.xid(1, 31) or watched.codes())
        nvml.xid(0, 94)
        await watched.until(lambda: (94, "0000:1a:00") in watched.codes())

    watched = play(nvml, story)
    assert (31, "0000:1b:00") in watched.codes()
    xid = next(f for f in watched.found if isinstance(f, XidSeen))
    assert (xid.node, xid.source) == (NODE, "nvml") and abs(xid.at_s - time.time()) < 60
    assert watched.blind() == []


@pytest.mark.slow
def test_each_state_is_read_and_told_when_it_changes(nvml: Any) -> None:
    states = {
        "remap_pending 1": ("remap_pending", 1),
        "remap_failed 1": ("remap_failed", 1),
        "retired_pending 1": ("retired_pending", 1),
        "recovery 2": ("recovery_action", 2),
        "throttle 72": ("hw_slowdown", 72),
        "width 8": ("pcie_width", 8),
        "link_down 1": ("nvlinks_down", 1),
        "ecc 3": ("ecc_uncorrected", 3),
        "ecc_ever 4": ("ecc_uncorrected_ever", 4),
        "remapped 2": ("remapped_uncorrected", 2),
        "retired_sbe 5": ("retired_sbe", 5),
        "retired_dbe 6": ("retired_dbe", 6),
        "replay 7": ("pcie_replays", 7),
        "crc_errors 8": ("nvlink_crc_errors", 8),
        "replay_errors 9": ("nvlink_replay_errors", 9),
        "recovery_errors 10": ("nvlink_recovery_errors", 10),
    }

    async def story(watched: Watched) -> None:
        well = await watched.until(lambda: watched.watch.state("0000:1b:00"))
        assert isinstance(well, GpuState) and watched.found == []
        assert (well.lost, well.pcie_width, well.pcie_width_max, well.nvlinks_down) == (False, 16, 16, 0)
        assert well.uuid.startswith("GPU-") and well.temperature_c == 40 and well.pids == ()
        nvml.set(*(f"1 {line}" for line in states), "1 pid 4242", "1 used 1000000")
        await watched.until(lambda: len(watched.found) >= len(states))
        for field, value in states.values():
            [(gpu, before, now)] = watched.changed(field)
            assert (gpu, before, now) == ("0000:1b:00", 16 if field == "pcie_width" else 0, value), field
        seen = watched.watch.state("0000:1b:00")
        assert seen is not None and (seen.pids, seen.used_bytes) == ((4242,), 1_000_000)
        nvml.set()
        await watched.until(lambda: len(watched.changed("remap_failed")) == 2)
        assert watched.changed("remap_failed")[-1] == ("0000:1b:00", 1, 0)

    watched = play(nvml, story)
    assert watched.blind() == []


@pytest.mark.slow
def test_a_lost_gpu_is_told_once_and_the_others_still_speak(nvml: Any) -> None:
    async def story(watched: Watched) -> None:
        await watched.until(lambda: watched.watch.state("0000:1b:00"))
        await watched.until(lambda: nvml.xid(1, 79) or watched.codes())
        await watched.until(lambda: watched.changed("lost"))
        nvml.xid(0, 48)
        await watched.until(lambda: (48, "0000:1a:00") in watched.codes())
        nvml.set("0 ecc 5")  # what is read after it is a look that had the chance to tell of the lost one again
        await watched.until(lambda: watched.changed("ecc_uncorrected"))

    watched = play(nvml, story)
    assert watched.changed("lost") == [("0000:1b:00", 0, 1)]


@pytest.mark.slow
def test_a_library_that_hangs_is_a_signal_and_hangs_nobody(nvml: Any) -> None:
    async def story(watched: Watched) -> None:
        await watched.until(lambda: watched.watch.state("0000:1a:00"))
        nvml.set("0 hang 1")
        await watched.until(watched.blind)
        # while it hangs this loop runs on, new readers are tried, and the same is not said again and again
        tried = len(watched.started)
        await watched.until(lambda: len(watched.started) >= tried + 2)
        assert watched.blind() == ["NVML hangs: no states within 0.5 s"]
        nvml.set()
        nvml.set("0 ecc 9")
        await watched.until(lambda: watched.changed("ecc_uncorrected"))

    play(nvml, story, answer_s=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"FAKE_NVML_HANG": "1"}, "NVML hangs"),
        ({"FAKE_NVML_NO_DRIVER": "1"}, "no NVML: NVMLError_DriverNotLoaded"),
    ],
)
def test_a_driver_that_does_not_answer_is_said_once(nvml: Any, env: dict[str, str], why: str) -> None:
    async def story(watched: Watched) -> None:
        await watched.until(watched.blind)
        await watched.until(lambda: len(watched.started) >= 3)  # two readers after the first have had no answer

    watched = play(nvml, story, answer_s=0.5, **env)
    assert len(watched.found) == 1 and watched.blind()[0].startswith(why) and not watched.over


@pytest.mark.slow
def test_without_the_library_it_says_so_and_ends(nvml: Any) -> None:
    async def story(watched: Watched) -> None:
        await watched.until(lambda: watched.over)

    watched = play(nvml, story, LD_LIBRARY_PATH="")
    assert watched.blind() == ["no NVML: NVMLError_LibraryNotFound: NVML Shared Library Not Found"]


@pytest.mark.slow
def test_a_reader_that_is_killed_is_started_again(nvml: Any) -> None:
    async def story(watched: Watched) -> None:
        await watched.until(lambda: watched.watch.state("0000:1a:00"))
        os.kill(watched.started[0], 9)
        await watched.until(lambda: watched.blind() == ["its reader ended"])
        nvml.set("0 remap_failed 1")
        await watched.until(lambda: watched.changed("remap_failed"))

    assert len(play(nvml, story).started) == 2


# ---------------------------------------------------------------- pure

STATES = st.builds(
    GpuState,
    gpu=st.just("0000:1a:00"),
    lost=st.none() | st.booleans(),
    pcie_width=st.none() | st.sampled_from([4, 8, 16]),
    pcie_width_max=st.none() | st.just(16),
    **{
        field: st.none() | st.integers(0, 3)
        for field in (*COUNTERS, *(f for f in FACTS if f not in ("lost", "pcie_width")))
    },
)


@given(st.lists(STATES, max_size=6))
def test_what_is_told_follows_what_was_told(states: list[GpuState]) -> None:
    """Each change begins where the last one of its field ended; the same state again tells nothing."""
    known: GpuState | None = None
    last: dict[str, int] = {}
    for state in states:
        found = changes(known, state, node=NODE, at_s=1.0, source="nvml")
        assert found == [] or known is None or known != merged(known, state)
        for change in found:
            assert change.now == int(getattr(state, change.field))
            if change.field in COUNTERS:
                assert change.before is not None and change.now > change.before
            if change.field in last and change.field in FACTS:
                assert change.before == last[change.field]
            last[change.field] = change.now
        known = merged(known, state)
        assert changes(known, state, node=NODE, at_s=1.0, source="nvml") == []
        assert not restarted(known, known)


@given(st.binary(max_size=200))
def test_any_line_of_the_child_is_read_or_passed_over(line: bytes) -> None:
    try:
        msgspec.json.decode(line, type=Said)
    except msgspec.MsgspecError:
        assert line != b'{"type":"events_alive"}'
