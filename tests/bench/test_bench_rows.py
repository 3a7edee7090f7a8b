"""The pure parts of the benches: rows and their JSON, what follows from marks, what counts as met."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import msgspec
import pytest

ROOT = str(Path(__file__).parents[2])


def bench(name: str):  # type: ignore[no-untyped-def]
    """A module of tests.bench: `python -m tests.bench` has the repository's root on its path, pytest has not."""
    if ROOT not in sys.path:
        sys.path.append(ROOT)  # last: `outlast` stays the installed one
    return importlib.import_module(f"tests.bench.{name}")


rows, marks, restart = bench("rows"), bench("marks"), bench("restart")


def test_a_row_is_met_up_to_its_limit_against_the_best_peer() -> None:
    row = rows.beside("f", "s", 2.5, {"slow": 40.0, "quick": 10.0}, at_most=0.25, target="<= 0.25 x")
    assert (row.limit, row.ratio, row.met) == (2.5, 0.25, True)
    assert not rows.beside("f", "s", 2.51, {"quick": 10.0}, at_most=0.25, target="<= 0.25 x").met


def test_what_could_not_be_measured_says_why_and_is_neither_met_nor_missed() -> None:
    row = rows.unmeasured("f", "s", 2.5, target="below it", why="no wheel")
    assert "no wheel" in row.figure and not row.met and not row.missed and row.peers == {} and row.limit is None
    assert "not measured" in rows.render([row])


def test_json_has_the_agreed_keys_and_reads_back(tmp_path: Path) -> None:
    made = (
        rows.beside("f", "s", 1.0, {"torchrun": 8.0}, at_most=0.25, target="t"),
        rows.unmeasured("g", "s", 1.0, target="t", why="w"),
    )
    rows.write(tmp_path / "deep" / "x.json", made)
    plain = json.loads((tmp_path / "deep" / "x.json").read_text())
    assert set(plain[0]) == {"figure", "unit", "ours", "peers", "limit", "ratio", "target", "met"}
    assert plain[0]["peers"] == {"torchrun": 8.0} and plain[0]["met"] is True
    assert rows.read(tmp_path / "deep" / "x.json") == made
    (tmp_path / "y.json").write_text('[{"figure": 1}]')
    with pytest.raises(msgspec.ValidationError):
        rows.read(tmp_path / "y.json")


def test_the_table_has_a_line_a_row() -> None:
    text = rows.render([rows.beside("f", "s", 9.0, {"torchrun": 8.0}, at_most=0.25, target="t")])
    assert len(text.splitlines()) == 2 and text.splitlines()[1].endswith("NO")


def line(rank: int, mono_s: float, attempt: int, **what: object) -> str:
    return json.dumps({"rank": rank, "mono_s": mono_s, "attempt": attempt, "pid": 100 + rank, **what})


def written(folder: Path) -> Path:
    """Two ranks: train_steps 1 .. 4 with 3 durable, killed at 5.0, then 4 again, the second rank later."""
    for rank in range(2):
        old = [line(rank, s, 0, train_step=s) for s in range(1, 5)]
        new = [line(rank, 6.0 + i / 4 + rank / 8, 1, phase=p) for i, p in enumerate(("init", "load", "compile"))]
        durable = line(rank, 4.5, 0, durable=3)
        last = line(rank, 8.0 + rank, 1, train_step=4)
        (folder / f"rank-{rank}.jsonl").write_text("\n".join([*old, durable, *new, last, '{"rank": 0, "torn']))
    return folder


def test_recovery_is_from_the_kill_to_the_slowest_ranks_train_step(tmp_path: Path) -> None:
    found = marks.recovery(marks.read_marks(written(tmp_path)), killed_mono_s=5.0, after=0)
    assert (found.done_s, found.init_s, found.killed_step, found.first_step) == (4.0, 1.125, 4, 4)
    with pytest.raises(ValueError, match="no sense"):
        marks.recovery(marks.read_marks(tmp_path), killed_mono_s=7.0, after=0)


def test_the_kill_waits_for_a_durable_checkpoint_and_for_all_ranks(tmp_path: Path) -> None:
    whole = marks.read_marks(written(tmp_path))
    old = {rank: tuple(m for m in one if m.attempt == 0) for rank, one in whole.items()}
    assert marks.ready_to_kill(old, ranks=2, save_every=3)
    assert not marks.ready_to_kill(old, ranks=3, save_every=3)
    assert not marks.ready_to_kill(old, ranks=2, save_every=4), "a save is due now"
    undurable = {rank: tuple(m for m in one if not m.durable) for rank, one in old.items()}
    assert not marks.ready_to_kill(undurable, ranks=2, save_every=3)
    assert marks.trains_again(whole, after=0, ranks=2) and not marks.trains_again(old, after=0, ranks=2)


def test_each_peer_has_its_own_target() -> None:
    times = {"outlast": [9.0, 2.0, 1.0], "torchrun": [8.0, 9.0, 7.0], "ft_launcher": [1.0, 3.0, 3.0]}
    quarter, below = restart.judge(times, "")
    assert (quarter.ours, quarter.peers, quarter.met) == (2.0, {"torchrun": 8.0}, True)
    assert (below.limit, below.met) == (3.0, True)
    del times["ft_launcher"]
    _, absent = restart.judge(times, "it does not install")
    assert "it does not install" in absent.figure and not absent.met
