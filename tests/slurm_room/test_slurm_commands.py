"""Argument lists, drains and fitness: what is said to Slurm and what is left alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.reliability.model import JobId, Node
from outlast.slurm import commands, drain, fitness, parsers
from outlast.slurm.node_state import NodeRow, parse_state

DATA = Path(__file__).parents[1] / "data" / "slurm"
N = Node("n3")


def test_a_step_names_its_nodes_and_counts() -> None:
    step = commands.Step(
        job=JobId("7"), nodes=(Node("n2"), Node("n3")), program=("/bin/agent", "x"), output="/r/%t.log"
    )
    argv = commands.step_argv(step)
    assert argv[0] == "srun" and argv[-2:] == ["/bin/agent", "x"]
    assert argv[argv.index("-N") + 1] == argv[argv.index("-n") + 1] == "2"
    assert argv[argv.index("-w") + 1] == "n[2-3]"
    assert {"--jobid=7", "--overlap", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none"} <= set(argv)


def test_a_container_sees_the_run_directory() -> None:
    step = commands.Step(
        job=JobId("7"), nodes=(N,), program=("x",), output="o", container="/i.sqsh", mounts=("/runs/a",)
    )
    argv = commands.step_argv(step)
    assert "--container-image=/i.sqsh" in argv and "--container-mounts=/runs/a:/runs/a" in argv


# ---------------------------------------------------------------- drain


def test_a_healthy_node_is_drained_with_our_reason() -> None:
    assert drain.drain_argv(NodeRow(node=N, state="mixed"), "XID 79") == [
        "scontrol",
        "update",
        "NodeName=n3",
        "State=DRAIN",
        "Reason=outlast: XID 79",
    ]


@pytest.mark.parametrize(
    ("row", "word"),
    [
        (NodeRow(node=N, state="idle", flags=("drain",), reason="DIMM swap", reason_user="ada"), "ada"),
        (NodeRow(node=N, state="idle", reason="watch this one"), "another's reason"),
        (NodeRow(node=N, state="down", flags=("not_responding",), reason="Not responding"), "another's reason"),
        (NodeRow(node=N, state="idle", flags=("drain",)), "without a reason"),
        (NodeRow(node=N, state="unknown", flags=("quantum",)), "quantum"),
        (NodeRow(node=N, state="future"), "future"),
    ],
)
def test_what_is_not_ours_is_left_alone(row: NodeRow, word: str) -> None:
    assert drain.drain_argv(row, "XID 79") is None
    assert word in drain.refusal(row)
    assert drain.undrain_argv(row) is None


def test_our_own_drain_is_not_repeated_and_may_be_undone() -> None:
    row = NodeRow(node=N, state="mixed", flags=("drain",), reason="outlast: XID 79", reason_user="root")
    assert drain.drain_argv(row, "XID 79") is None and drain.refusal(row) == ""
    assert drain.undrain_argv(row) == ["scontrol", "update", "NodeName=n3", "State=UNDRAIN"]


def test_our_reason_left_on_an_undrained_node_does_not_hinder_a_new_drain() -> None:
    row = NodeRow(node=N, state="idle", reason="outlast: XID 79")
    assert drain.drain_argv(row, "XID 48") is not None
    assert drain.undrain_argv(row) is None


states = st.sampled_from(["allocated", "mixed", "idle", "down", "unknown", "future", "error"])
rows = st.builds(
    NodeRow,
    node=st.just(N),
    state=states,
    flags=st.sampled_from([(), ("drain",), ("drain", "not_responding"), ("maintenance",)]),
    reason=st.sampled_from(["", "outlast: x", "ticket 5512", "Not responding", "OUTLAST: x", " outlast: x"]),
)


@given(rows, st.text(max_size=300))
def test_no_drain_ever_replaces_anothers_reason(row: NodeRow, reason: str) -> None:
    argv = drain.drain_argv(row, reason)
    if argv is not None:
        assert row.reason == "" or row.reason.startswith(drain.OWNER)
        assert argv[-1].startswith("Reason=outlast:") and argv[-1].isprintable() and len(argv[-1]) < 220
    undrain = drain.undrain_argv(row)
    if undrain is not None:
        assert row.reason.startswith(drain.OWNER) and row.is_draining


# ---------------------------------------------------------------- fitness

ROOT = fitness.Rights(user="root", slurm_user="slurm")


def settings(**changed: str) -> dict[str, str]:
    return parsers.parse_config((DATA / "scontrol-22.05-config.txt").read_text()) | changed


def finding(name: str, rights: fitness.Rights = ROOT, **changed: str) -> fitness.Finding:
    (found,) = (f for f in fitness.inspect(settings(**changed), rights) if f.name == name)
    return found


def test_the_captured_site_lacks_accounting_only_by_its_own_choice() -> None:
    levels = {f.name: f.level for f in fitness.inspect(settings(), ROOT)}
    assert levels["accounting"] == "warning" and levels["Slurm version"] == "ok" and "bad" not in levels.values()


@pytest.mark.parametrize(
    ("name", "changed", "level"),
    [
        ("Slurm version", {"SLURM_VERSION": "20.11.9"}, "warning"),
        ("Slurm version", {"SLURM_VERSION": "24.11.5"}, "ok"),
        ("PreemptMode", {"PreemptMode": "CANCEL"}, "warning"),
        ("PreemptMode", {"PreemptMode": "GANG,SUSPEND"}, "warning"),
        ("PreemptMode", {"PreemptMode": "REQUEUE"}, "ok"),
        ("KillWait", {"KillWait": "2 sec"}, "warning"),
        ("KillWait", {"KillWait": "30 sec"}, "ok"),
        ("UnkillableStepTimeout", {"UnkillableStepTimeout": "60 sec", "MessageTimeout": "100 sec"}, "warning"),
        ("cred_expire", {"AuthInfo": "cred_expire=600"}, "warning"),
        ("cred_expire", {"AuthInfo": ""}, "ok"),
        ("SlurmdTimeout", {"SlurmdTimeout": "0 sec"}, "bad"),
        ("ReturnToService", {"ReturnToService": "2"}, "warning"),
        ("accounting", {"AccountingStorageType": "accounting_storage/slurmdbd"}, "ok"),
    ],
)
def test_settings(name: str, changed: dict[str, str], level: str) -> None:
    found = finding(name, **changed)
    assert found.level == level
    assert bool(found.advice) == (level != "ok")


@pytest.mark.parametrize(
    ("user", "level", "may"),
    [
        ("root", "", True),
        ("slurm", "None", True),
        ("ada", "Operator", True),
        ("ada", "Administrator", True),
        ("ada", "None", False),
        ("ada", "", False),
    ],
)
def test_rights(user: str, level: str, may: bool) -> None:
    rights = fitness.Rights(user=user, admin_level=level, slurm_user="slurm")
    assert rights.may_drain is may
    assert finding("drain rights", rights).level == ("ok" if may else "warning")


@given(st.dictionaries(st.sampled_from(sorted(settings())), st.text(max_size=20)))
def test_strange_settings_are_findings_too(changed: dict[str, str]) -> None:
    found = fitness.inspect(settings(**changed), ROOT)
    assert {f.level for f in found} <= {"ok", "warning", "bad"}
    assert msgspec.json.encode(found)


def test_a_place_without_slurm_is_a_finding(tmp_path: Path) -> None:
    (found,) = fitness.inspect_site(fitness.SlurmClient({"PATH": str(tmp_path)}))
    assert found.level == "bad" and "scontrol" in found.found and found.advice


def test_state_words_of_our_own_drain_are_understood() -> None:
    assert parse_state("IDLE+DRAIN") == ("idle", ("drain",))
