"""`outlast replay`: logs in, the supervisor's own decisions out, and nothing touched."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.reliability.actions import Swap
from outlast.reliability.catalogue import load_catalogue
from outlast.reliability.cli.compose import make_policy
from outlast.reliability.cli.root import start
from outlast.reliability.decide import decide
from outlast.reliability.model import Node, NodeState, OperatorAsked, Signal, SourceBlind, XidSeen
from outlast.reliability.replay_rows import Told, acts_of, differences
from outlast.reliability.replaying import Fed, JobSpan, Replay, Setting
from outlast.reliability.runfile import Limits

DAY_S = 1_795_996_800.0  # 2026-11-30 00:00 UTC
CONTROLLER = Path(__file__).parent.parent / "data" / "slurm" / "slurmctld-22.05-drain-down-requeue.log"
POLICY = make_policy(load_catalogue(), Limits())


def xid(code: int, node: str, at_s: float, gpu: str = "0000:3b:00") -> Fed:
    signal = XidSeen(node=Node(node), at_s=DAY_S + at_s, code=code, gpu=gpu, source="kernel_log")
    return Fed(at_s=DAY_S + at_s, signal=signal, source=f"kern.log:{at_s:g}")


def run(
    feds: Iterable[Fed], *, setting: Setting | None = None, jobs: Iterable[JobSpan] = (), nodes: str = ""
) -> list[Told]:
    replay = Replay(POLICY, setting or Setting(), jobs=tuple(jobs), nodes=tuple(Node(n) for n in nodes.split()))
    for fed in feds:
        replay.feed(fed)
    return list(replay.finish())


def short(told: Iterable[Told]) -> list[tuple[str, str | None, tuple[str, ...]]]:
    return [(t.rule, t.node, t.acts) for t in told]


def test_a_broken_gpu_is_drained_and_its_run_restarted_once() -> None:
    burst = [xid(79, "n1", 10.0 + i / 100, f"0000:{i:02x}:00") for i in range(8)]
    told = run([*burst, *burst], nodes="n1 n2 n3 n4")
    assert short(told) == [("gpu_bus_loss", "n1", ("drain", "restart"))]
    assert told[0].source == "kern.log:10" and "restart without n1" in told[0].detail


def test_a_program_s_line_takes_nothing_out() -> None:
    told = run([xid(31, "n1", 10.0), xid(13, "n2", 20.0), xid(31, "n3", 3000.0)], nodes="n1 n2 n3 n4")
    assert {t.acts for t in told} == {()} and {t.node for t in told} == {None}


def test_one_cause_on_many_nodes_drains_none_of_them() -> None:
    told = run([xid(79, n, 10.0) for n in ("n1", "n2", "n3", "n4")], nodes="n1 n2 n3 n4 n5 n6")
    assert short(told) == [("many_nodes_at_once", None, ())]


def test_the_drain_budget_is_an_advice_to_a_person() -> None:
    spaced = [xid(79, f"n{i}", 400.0 * i) for i in range(1, 5)]
    setting = Setting(limits=Limits(drains_per_hour=2), spares=8)
    told = run(spaced, setting=setting, nodes=" ".join(f"n{i}" for i in range(1, 9)))
    assert [t.acts[0] for t in told] == ["drain", "drain", "advise", "advise"]
    assert "page" in told[2].acts and "budget is 2" in told[2].detail
    assert [t.acts[0] for t in run(spaced, setting=Setting(limits=Limits(drains_per_hour=9)), nodes="n1 n2 n3 n4")] == (
        ["drain"] * 4
    )


def test_restarts_without_progress_are_held_and_a_person_continues() -> None:
    close = [xid(79, f"n{i}", 100.0 * i) for i in range(1, 4)]
    late = xid(79, "n5", 9_000.0)
    setting = Setting(limits=Limits(attempts_without_progress=2, drains_per_hour=9), spares=8)
    told = run([*close, late], setting=setting, nodes=" ".join(f"n{i}" for i in range(1, 9)))
    assert [t.acts for t in told] == [("drain", "restart"), ("drain", "page"), ("drain",), ("drain", "restart")]


def test_each_job_is_supervised_by_itself_and_only_while_it_ran() -> None:
    jobs = [
        JobSpan(job="1", nodes=("n1", "n2"), start_s=DAY_S, end_s=DAY_S + 100, state="COMPLETED"),  # type: ignore[arg-type]
        JobSpan(job="2", nodes=("n1", "n3"), start_s=DAY_S + 200, end_s=None),  # type: ignore[arg-type]
    ]
    told = run([xid(79, "n1", 50.0), xid(79, "n1", 150.0), xid(79, "n1", 250.0), xid(79, "n9", 300.0)], jobs=jobs)
    assert [(t.run, t.node, t.acts) for t in told] == [
        ("job 1", "n1", ("drain", "restart")),
        ("(no job)", "n1", ("drain",)),
        ("job 2", "n1", ("drain", "restart")),
        ("(no job)", "n9", ("drain",)),
    ]


def test_a_node_that_is_back_in_service_is_watched_anew() -> None:
    jobs = [JobSpan(job="1", nodes=("x",), start_s=0.0, end_s=1.0)]  # type: ignore[arg-type]
    back = NodeState(node=Node("n1"), at_s=DAY_S + 500, state="idle")
    told = run([xid(79, "n1", 10.0), Fed(at_s=DAY_S + 500, signal=back), xid(79, "n1", 900.0)], jobs=jobs)
    assert short(told) == [("gpu_bus_loss", "n1", ("drain",))] * 2


def test_the_same_signals_are_decided_as_the_live_core_does() -> None:
    """Not a second policy: breaking decide breaks the replay."""
    import outlast.reliability.replaying as replaying

    assert replaying.decide is decide
    assert acts_of((Swap(out=(Node("n"),), into=(), why=""),)) == ("restart",)


def test_two_policies_differ_where_they_differ() -> None:
    feds = [xid(79, "n1", 10.0), xid(119, "n2", 500.0), xid(31, "n3", 900.0)]
    first = run(feds, nodes="n1 n2 n3 n4")
    assert differences(first, first) == ()
    milder = msgspec.structs.replace(
        POLICY, xid=lambda code, text="": load_catalogue().xid(31 if code == 119 else code, text)
    )
    quiet = Replay(milder, Setting(), nodes=(Node("n4"),))
    for fed in feds:
        quiet.feed(fed)
    found = differences(first, quiet.finish())
    assert {d.source for d in found} == {"kern.log:500"} and found[0].first is not None
    assert found[0].first.acts == ("drain", "restart")


SIGNALS = st.one_of(
    st.builds(
        XidSeen,
        node=st.sampled_from([Node(f"n{i}") for i in range(6)]),
        at_s=st.just(0.0),
        code=st.sampled_from([13, 31, 43, 48, 63, 64, 74, 79, 94, 95, 119, 154, 999]),
        gpu=st.sampled_from([None, "0000:3b:00", "0000:5d:00"]),
        text=st.sampled_from(["", "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"]),
        caused_by=st.sampled_from([None, 79]),
    ),
    st.builds(SourceBlind, node=st.just(Node("n1")), at_s=st.just(0.0), source=st.just("kmsg"), why=st.just("x")),
    st.builds(
        NodeState,
        node=st.sampled_from([Node("n1"), Node("n2")]),
        at_s=st.just(0.0),
        state=st.sampled_from(["down", "idle", "allocated"]),
        flags=st.sampled_from([(), ("drain",)]),
        reason=st.sampled_from(["", "outlast: x", "bad DIMM"]),
    ),
    st.builds(OperatorAsked, at_s=st.just(0.0), what=st.just("stop"), who=st.just("x")),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(SIGNALS, st.floats(0, 4000)), max_size=25), st.booleans())
def test_any_history_is_told_within_the_laws(history: list[tuple[Signal, float]], in_jobs: bool) -> None:
    at_s = DAY_S
    feds = []
    for signal, gap_s in history:
        at_s += gap_s
        feds.append(Fed(at_s=at_s, signal=signal, source=str(len(feds))))
    jobs = [JobSpan(job="1", nodes=("n1", "n2"), start_s=DAY_S, end_s=DAY_S + 5000, state="FAILED")]  # type: ignore[arg-type]
    told = run(feds, jobs=jobs if in_jobs else (), nodes="n0 n1 n2 n3")
    for one in told:
        assert not ("drain" in one.acts and one.node is None)
        assert not any("(spare" in word for word in (one.node or "",))
    times = [t.at_s for t in told if "drain" in t.acts and t.run != "job 1"]
    for at in times:
        assert sum(1 for t in times if at - 3600 < t <= at) <= Limits().drains_per_hour
    # the same history again tells the same
    assert run(feds, jobs=jobs if in_jobs else (), nodes="n0 n1 n2 n3") == told


# ---------------------------------------------------------------- the command on files

LINE = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def replayed(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    assert start(["replay", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def stamp(path: Path, at_s: float = DAY_S + 86_400) -> Path:
    os.utime(path, (at_s, at_s))
    return path


def journal_export(node: str) -> str:
    fields = {
        "__CURSOR": "s=1",
        "__REALTIME_TIMESTAMP": f"{int((DAY_S + 600) * 1e6)}",
        "_TRANSPORT": "kernel",
        "SYSLOG_FACILITY": "0",
        "_HOSTNAME": node,
        "MESSAGE": LINE,
    }
    return "\n".join(f"{k}={v}" for k, v in fields.items()) + "\n\n"


FORMS = {
    "rfc3164": f"Nov 30 00:10:00 n1 kernel: [  600.000000] {LINE}\n",
    "iso": f"2026-11-30T00:10:00.000000+00:00 n1 kernel: {LINE}\n",
    "zone": f"2026-11-30T02:10:00+02:00 n1 kernel: [600.0] {LINE}\n",
    "rfc5424": f"<3>1 2026-11-30T00:10:00Z n1 kernel - - - {LINE}\n",
    "domain": f"2026-11-30T00:10:00Z n1.cluster.example kernel: {LINE}\n",
    "journal json": json.dumps(
        {
            "MESSAGE": LINE,
            "_HOSTNAME": "n1",
            "_TRANSPORT": "kernel",
            "SYSLOG_FACILITY": "0",
            "__REALTIME_TIMESTAMP": f"{int((DAY_S + 600) * 1e6)}",
        }
    )
    + "\n",
    "journal export": journal_export("n1"),
}
NAMELESS = {
    "dmesg": f"[  600.000000] {LINE}\n[86400.000000] the end\n",
    "dmesg -T": f"[Mon Nov 30 00:10:00 2026] {LINE}\n",
    "dmesg -x": f"kern  :err   : [  600.000000] {LINE}\n[86400.000000] the end\n",
    "dmesg iso": f"2026-11-30T00:10:00,000000+00:00 {LINE}\n",
    "kmsg": f"3,1,600000000,-;{LINE}\n6,2,86400000000,-;the end\n",
}


@pytest.mark.parametrize("form", [*FORMS, *NAMELESS])
def test_every_form_of_log_names_node_and_time(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kern.log"
    path.write_text({**FORMS, **NAMELESS}[form])
    stamp(path)
    word = f"n1={path}" if form in NAMELESS else path
    told = replayed(capsys, "--kernel-log", word)
    [verdict] = told["policies"][0]["verdicts"]
    assert (verdict["node"], verdict["acts"]) == ("n1", ["drain", "restart"])
    assert abs(verdict["at_s"] - (DAY_S + 600)) < 1.0
    assert verdict["source"].startswith(f"{path}:")


def test_a_clock_that_steps_back_does_not_disorder_the_merge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "a.log", tmp_path / "b.log"
    times = ("00:10:00", "00:05:00", "00:12:00")
    first.write_text("".join(f"2026-11-30T{t}Z n{i} kernel: {LINE}\n" for i, t in enumerate(times)))
    second.write_text(f"2026-11-30T00:11:00Z n7 kernel: {LINE}\n")
    stamp(first), stamp(second)
    told = replayed(capsys, "--kernel-log", first, second, "--nodes", "n[0-40]", "--drains-per-hour", "9")
    times_s = [v["at_s"] for v in told["policies"][0]["verdicts"]]
    assert times_s == sorted(times_s) and told["from_s"] == DAY_S + 600 and told["to_s"] == DAY_S + 720


def test_packed_files_and_several_nodes_in_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(FORMS["iso"].encode()))
    (tmp_path / "b.log.xz").write_bytes(lzma.compress(FORMS["iso"].replace("n1", "n2").encode()))
    stamp(tmp_path / "a.log.gz"), stamp(tmp_path / "b.log.xz")
    words = ("--kernel-log", tmp_path / "a.log.gz", tmp_path / "b.log.xz", "--nodes", "n[1-9]")
    told = replayed(capsys, *words)
    assert (told["signals"], told["nodes"]) == (2, 9)


def test_a_line_without_a_node_is_told_not_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "dmesg.txt"
    path.write_text(NAMELESS["dmesg -T"])
    assert start(["replay", "--kernel-log", str(path), "--json"]) == 0
    out = capsys.readouterr()
    assert json.loads(out.out)["nameless"] == 1 and f"{path}:1: the line names no node" in out.err


def test_other_kernel_lines_count_as_they_do_live(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kern.log"
    path.write_text(
        "2026-11-30T00:10:00Z n1 kernel: nvidia-nvswitch2: SXid (PCI:0000:85:00.0): 20034, Fatal, Link 61 LTSSM\n"
        "2026-11-30T00:20:00Z n2 kernel: Memory cgroup out of memory: Killed process 71 (python) total-vm:1kB\n"
    )
    [verdict] = replayed(capsys, "--kernel-log", path)["policies"][0]["verdicts"]
    assert (verdict["node"], verdict["kind"], verdict["acts"]) == ("n1", "hardware_fault", ["drain", "restart"])


def test_what_a_program_printed_is_no_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "messages"
    path.write_text(f"2026-11-30T00:10:00Z n1 python3[71]: {LINE}\n")
    assert replayed(capsys, "--kernel-log", path)["signals"] == 0


def test_the_controllers_log_says_which_run_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kern.log"
    path.write_text(
        f"2026-11-30T19:36:00Z n4 kernel: {LINE}\n2026-11-30T19:36:30Z n5 kernel: {LINE}\n"
        f"2026-11-30T19:39:30Z n2 kernel: {LINE}\n"
    )
    told = replayed(capsys, "--kernel-log", stamp(path), "--slurm", CONTROLLER)
    rows = [(v["run"], v["node"], v["rule"], v["acts"]) for v in told["policies"][0]["verdicts"]]
    assert ("(no job)", "n4", "gpu_bus_loss", ["drain"]) in rows
    assert ("job 6", "n5", "gpu_bus_loss", ["drain", "restart"]) in rows
    assert ("job 10", "n2", "gpu_bus_loss", ["drain", "restart"]) in rows
    assert any(row[:3] == ("job 10", "n1", "agent_lost") for row in rows)


def test_two_policies_and_the_page_for_a_person(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, site = tmp_path / "kern.log", tmp_path / "site.yaml"
    path.write_text(FORMS["iso"])
    site.write_text("xids:\n  79: {drains: false, convicts: true, alone: true}\n")
    words = ["replay", "--kernel-log", str(stamp(path)), "--policy", "built-in", "--policy", str(site)]
    assert start(words) == 0
    out = capsys.readouterr().out
    assert "policy built-in: 1 drain, 0 advise, 1 restart" in out
    assert f"policy {site}: 0 drain, 0 advise, 1 restart" in out
    assert "the difference: 1" in out and "would: drain n1; restart without n1" in out
    told = replayed(capsys, *words[1:])
    assert told["differences"][0]["first"]["acts"] == ["drain", "restart"]
    assert told["differences"][0]["second"]["acts"] == ["restart"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kernel-log", "/nowhere/kern.log"], "/nowhere/kern.log: No such file"),
        (["--kernel-log", "{log}", "--policy", "/nowhere.yaml"], "/nowhere.yaml"),
        (["--kernel-log", "{log}", "--slurm", "{log}"], "slurmctld's own log"),
        (["--kernel-log", "{log}", "--nodes", "n[1-"], "--nodes"),
        (["--kernel-log", "{log}", "--policy", "a", "--policy", "b", "--policy", "c"], "expected one or two"),
    ],
)
def test_what_cannot_be_used_is_said(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "kern.log"
    log.write_text(FORMS["iso"])
    assert start(["replay", *(w.format(log=log) for w in words)]) == 2
    assert message in capsys.readouterr().err


@settings(deadline=None, max_examples=40)
@given(st.binary(max_size=3_000), st.sampled_from([*FORMS.values(), *NAMELESS.values()]), st.integers(0, 3_000))
def test_any_bytes_are_a_log(tmp_path_factory: pytest.TempPathFactory, noise: bytes, form: str, place: int) -> None:
    from outlast.reliability.cli.replay_io import Counts, KernelFile, Names, SlurmPast, by_time
    from outlast.reliability.findings import ConfigError

    path = tmp_path_factory.mktemp("noise") / "log"
    good = form.encode()
    path.write_bytes(good[:place] + noise + good[place:])
    counts = Counts()
    feds = list(by_time([KernelFile(word, Names(), counts).read() for word in (str(path), f"n1={path}")]))
    assert all(a.at_s <= b.at_s for a, b in pairwise(feds))
    run(feds)
    try:
        past = list(SlurmPast([path], silent_s=15.0).signals())
    except ConfigError as error:
        assert str(path) in str(error)
    else:
        assert all(a.at_s <= b.at_s for a, b in pairwise(past))


@pytest.mark.long
def test_a_gigabyte_streams(tmp_path: Path) -> None:
    """Memory must not grow with the file: at most 64 MiB beyond what a small file takes."""
    chance = random.Random(5)
    stamps = [f"2026-11-30T{i // 3600 % 24:02d}:{i // 60 % 60:02d}:{i % 60:02d}Z" for i in range(20_000)]
    noise = "".join(
        f"{at} gpu-{chance.randrange(400):03d} kernel: [1.0] usb 1-1: new device number {i}\n"
        for i, at in enumerate(stamps)
    )
    text = LINE.replace("79", "31")
    faults = "".join(
        f"2026-11-30T23:00:{i % 60:02d}Z gpu-{i % 400:03d} kernel: {text.replace('3b', f'{i % 256:02x}')}\n"
        for i in range(2_000)
    )
    small, large = tmp_path / "small.log", tmp_path / "large.log"
    small.write_text(noise + faults)
    block = (noise + faults).encode()
    with large.open("wb") as file:
        while file.tell() < 1 << 30:
            file.write(block)
    peaks = [_peak_kib(stamp(path)) for path in (small, large)]
    assert peaks[1] - peaks[0] <= 64 * 1024, peaks


def _peak_kib(path: Path) -> int:
    program = (
        "import sys, resource\n"
        "from outlast.reliability.cli.root import start\n"
        "code = start(['replay', '--kernel-log', sys.argv[1], '--json'])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=3000, check=True
    )
    return int(done.stderr.split()[-1])
