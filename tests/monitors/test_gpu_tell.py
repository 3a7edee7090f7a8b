"""What of a GPU's changing state is told, and how often."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outlast.monitors.gpu_state import COUNTERS, FACTS
from outlast.monitors.gpu_tell import AGAIN_S, EACH, SELDOM, GpuTeller
from outlast.reliability.model import GpuChanged, Node, SourceBlind, XidSeen

NODE = Node("n1")


def changed(field: str, before: int | None, now: int, at_s: float = 0.0, gpu: str = "0000:1a:00") -> GpuChanged:
    return GpuChanged(node=NODE, at_s=at_s, source="nvml", gpu=gpu, field=field, before=before, now=now)


def test_what_is_no_state_passes() -> None:
    for found in (
        XidSeen(node=NODE, at_s=1.0, code=79),
        SourceBlind(node=NODE, at_s=1.0, source="nvml", why="it hangs"),
    ):
        assert GpuTeller().pick(found) is found


def test_proof_is_told_each_time_it_comes_and_goes() -> None:
    teller = GpuTeller()
    for at_s, before, now in ((0, 0, 1), (1, 1, 0), (2, 0, 1)):
        assert teller.pick(changed("lost", before, now, at_s)) == changed("lost", before, now, at_s)


def test_a_gpu_at_its_thermal_limit_is_one_line_in_ten_minutes() -> None:
    teller = GpuTeller()
    told = [
        found
        for n in range(int(2 * AGAIN_S / 10) + 1)
        if (found := teller.pick(changed("hw_slowdown", 64 * ((n + 1) % 2), 64 * (n % 2), at_s=10.0 * n)))
    ]
    assert len(told) <= 3


def test_counted_errors_are_told_again_with_all_that_came_between() -> None:
    teller = GpuTeller()
    assert teller.pick(changed("ecc_uncorrected", 0, 1)) is not None
    assert teller.pick(changed("ecc_uncorrected", 1, 2, at_s=10)) is None
    assert teller.pick(changed("ecc_uncorrected", 2, 5, at_s=AGAIN_S)) == changed("ecc_uncorrected", 1, 5, at_s=AGAIN_S)


def test_gpus_do_not_silence_each_other() -> None:
    teller = GpuTeller()
    assert teller.pick(changed("pcie_width", 16, 8)) and teller.pick(changed("pcie_width", 16, 8, gpu="0000:1b:00"))


def test_rates_stay_with_whoever_keeps_metrics() -> None:
    rates = {*FACTS, *COUNTERS} - EACH - SELDOM
    assert rates == {
        *("retired_sbe", "pcie_replays", "nvlink_crc_errors", "nvlink_replay_errors", "nvlink_recovery_errors"),
        *("thermal_violation_us", "power_violation_us"),
    }
    assert all(GpuTeller().pick(changed(field, 1, 2)) is None for field in rates)


@given(st.lists(st.tuples(st.text(max_size=3), st.sampled_from(sorted(SELDOM)), st.integers(0, 9)), max_size=60))
def test_a_storm_within_the_time_is_one_line_a_gpu_and_field(storm: list[tuple[str, str, int]]) -> None:
    teller = GpuTeller()
    told = [
        found for n, (gpu, field, now) in enumerate(storm) if (found := teller.pick(changed(field, 0, now, n, gpu)))
    ]
    assert len(told) == len({(gpu, field) for gpu, field, _ in storm})
