"""What breaks, on a real Slurm of eight nodes with real ranks that train: each run ends at its target train_step with
the undisturbed run's losses, on nodes that the test checks, and no good node is drained."""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import pytest
from slurm_harness import TARGET

from outlast.reliability import model as m
from outlast.reliability.actions import Feed, Hold, Requeue
from outlast.reliability.attempt import State
from outlast.reliability.events import AttemptMoved, AttemptPlanned, EpochTaken, RunEnded, Seen, StepsDone
from outlast.reliability.fence import highest_number
from outlast.reliability.verdict import Kind

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.megatron]


def test_xid_79_swaps_the_node_and_drains_it(start, reference, idle_testbed):
    run = start()
    run.until_step(12)
    bad = run.plan.nodes[0]
    run.xid(bad, 79)
    assert run.until_ended() == "finished"
    run.check_result(reference)
    run.check_plans()
    run.check_drained(bad)
    assert bad not in run.plan.nodes and len(run.view.attempts) == 2
    (verdict,) = run.verdicts
    assert (verdict.kind, verdict.node) == (Kind.HARDWARE_FAULT, bad)
    idle_testbed.undrain(bad)


def test_a_node_drains_within_a_second_and_is_drained_once_the_swap_has_emptied_it(start, reference, idle_testbed):
    run = start(step_s=0.25)
    run.until_step(12)
    bad = run.plan.nodes[1]  # the batch node cannot leave its job

    def slurm_says() -> str:
        return run.bed.run(["sinfo", "-h", "-N", "-n", bad, "-o", "%T|%E"]).strip()

    written_s = time.time()
    run.xid(bad, 79)
    run.until("the drain", lambda: "drain" in slurm_says() and "outlast:" in slurm_says(), 10)
    assert time.time() - written_s < 1.0, slurm_says()
    emptied = run.until(
        "the swap",
        lambda: [e for e in run.events if isinstance(e.body, AttemptMoved) and e.body.state is State.ENDED],
        40,
    )
    run.until("the node drained", lambda: slurm_says().startswith("drained|"), 20)
    assert time.time() - emptied[0].at_s < 5.0
    assert run.squeue() == "RUNNING" and not run.of(RunEnded), "the job goes on without it"
    assert run.until_ended() == "finished"
    run.check_result(reference)
    run.check_plans()
    run.check_drained(bad)
    assert len(run.view.attempts) == 2 and len(run.verdicts) == 1, run.story()
    idle_testbed.undrain(bad)


def test_xid_31_alone_blames_and_drains_nobody(start, reference):
    run = start()
    run.until_step(12)
    run.xid(run.plan.nodes[0], 31, "MMU Fault: ENGINE GRAPHICS GPC0 GPCCLIENT_T1_0 faulted @ 0x7f_0000")
    assert run.until_ended() == "finished"
    run.check_result(reference)
    run.check_drained()
    assert len(run.view.attempts) == 1
    (verdict,) = run.verdicts
    assert not verdict.convicts and verdict.kind is Kind.APP_FAULT


def test_an_exception_in_one_rank_restarts_in_place(start, reference):
    run = start(faults="exception:rank=1:train_step=25:once=%files/raised")
    assert run.until_ended() == "finished"
    run.check_result(reference)
    run.check_drained()
    plans = [p.plan.nodes for p in run.of(AttemptPlanned)]
    assert len(plans) == 2 and plans[0] == plans[1]
    (verdict,) = run.verdicts
    assert (verdict.kind, verdict.rank) == (Kind.APP_FAULT, 1) and "InjectedFault" in verdict.because


def test_a_rank_that_is_killed_restarts_in_place(start, reference):
    run = start()
    run.until_step(12)
    run.kill(run.pid_of(1))
    assert run.until_ended() == "finished"
    run.check_result(reference)
    run.check_drained()
    (verdict,) = run.verdicts
    assert (verdict.kind, verdict.rank, verdict.convicts) == (Kind.TRANSIENT, 1, False)


def test_a_stopped_rank_is_named_with_its_stack(start, reference):
    run = start()
    run.until_step(12)
    run.kill(run.pid_of(1), signal.SIGSTOP)
    assert run.until_ended() == "finished"
    run.check_result(reference)
    run.check_drained()
    (verdict,) = run.verdicts
    assert verdict.rank == 1 and verdict.rule == "no_progress"
    (stuck,) = [s.signal for s in run.of(Seen) if isinstance(s.signal, m.NoProgress)]
    assert stuck.suspect == 1 and stuck.stack
    kept = list((run.run_dir.root / "attempts" / "0001" / "ranks" / "00001").glob("stack*"))
    assert kept and kept[0].read_text().strip()


def test_a_stopped_supervisor_is_succeeded_and_ends_without_an_action(start, reference, idle_testbed):
    run = start(step_s=0.6)  # a takeover takes its time: the run must not be over before
    run.until_step(5)
    first = run.supervisor_pid()
    os.kill(first, signal.SIGSTOP)
    try:
        run.until("a successor", lambda: highest_number(run.run_dir) > 1, 40)
        run.until("the successor's first step", lambda: any(e.epoch > 1 for e in run.events), 30)
        bad = run.plan.nodes[1]
        run.xid(bad, 79)
        run.until("the swap", lambda: len(run.of(AttemptPlanned)) == 2, 40)
    finally:
        os.kill(first, signal.SIGCONT)
    assert run.until_ended() == "finished"
    run.check_result(reference)
    run.check_plans()
    run.check_drained(bad)
    epochs = [e.epoch for e in run.events]
    assert epochs == sorted(epochs), "a line of the overtaken supervisor counts"
    run.until_job_over()
    idle_testbed.undrain(bad)


def test_the_users_scancel_ends_the_run_for_good(start, idle_testbed):
    run = start()
    run.until_step(8)
    idle_testbed.run(["scancel", str(run.job)])
    run.until_job_over()
    ended = run.of(RunEnded)
    assert [e.outcome for e in ended] == ["cancelled"], run.story()
    assert len(run.view.attempts) == 1
    run.check_drained()


def test_a_crash_of_the_node_with_rank_0_and_the_batch_script_costs_one_spare(start, reference, idle_testbed):
    run = start()
    run.until_step(12)
    bad = run.plan.nodes[0]
    batch = idle_testbed.run(["squeue", "-h", "-j", str(run.job), "-o", "%B"]).strip()
    assert batch == bad, "rank 0 is on the batch node"
    idle_testbed.crash_node(bad)
    assert run.until_ended() == "finished"
    run.check_result(reference)
    run.check_plans()
    run.check_drained()
    assert bad not in run.plan.nodes and highest_number(run.run_dir) >= 2
    run.until_job_over()
    idle_testbed.start_node(bad)


def test_a_crashed_spare_disturbs_nothing(start, reference, idle_testbed):
    run = start()
    run.until_step(12)
    nodes = idle_testbed.run(["squeue", "-h", "-j", str(run.job), "-o", "%N"]).strip()
    spare = next(n for n in run.bed.nodes if n in _expand(nodes) and n not in run.plan.nodes)
    idle_testbed.crash_node(spare)
    assert run.until_ended() == "finished"
    run.check_result(reference)
    run.check_drained()
    assert len(run.view.attempts) == 1
    idle_testbed.start_node(spare)


def test_an_admins_drain_is_obeyed_at_a_checkpoint(start, reference, idle_testbed):
    run = start()
    run.until_step(12)
    node = run.plan.nodes[0]
    idle_testbed.drain(node, "DIMM swap, ticket 5512")
    assert run.until_ended() == "finished"
    run.check_result(reference)
    run.check_plans()
    run.check_drained()
    assert node not in run.plan.nodes
    assert run.plan.restore_step > 12, "it waited for a checkpoint"
    assert "ticket 5512" in idle_testbed.run(["sinfo", "-h", "-n", node, "-o", "%E"])
    idle_testbed.undrain(node)


def test_the_newest_checkpoint_torn(start, reference):
    run = start()
    run.until("checkpoint 30 durable", lambda: (run.run_dir.checkpoints / "iter_0000030" / "COMMITTED").exists(), 60)
    shard = max((run.run_dir.checkpoints / "iter_0000030").glob("*.distcp"), key=lambda p: p.stat().st_size)
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 8)
    run.kill(run.pid_of(0))
    assert run.until_ended() == "finished"
    run.check_result(reference)
    run.check_drained()
    assert Kind.CHECKPOINT_UNUSABLE in {v.kind for v in run.verdicts}
    assert run.of(AttemptPlanned)[1].plan.restore_step < 30
    assert list((run.run_dir.checkpoints / "quarantine").glob("iter_0000030*"))


def test_the_same_exception_three_times_is_held_not_looped(start):
    from outlast.reliability.status import read_rows

    run = start(faults="exception:rank=1:train_step=25", limits={"hold_max_s": 600.0})
    run.until("the hold", lambda: any(isinstance(a, Hold) for a in run.actions), 120)
    assert len(run.of(AttemptPlanned)) == 3
    assert run.verdicts[-1].kind is Kind.DATA_OR_OPTIMIZER and "InjectedFault" in run.verdicts[-1].because
    run.until("the last attempt's end", lambda: run.of(AttemptMoved)[-1].state == "ended", 30)
    run.until("the hold in the status", lambda: [r.state for r in read_rows([run.run_dir.root])] == ["held"], 20)
    ask(run, "stop")
    assert run.until_ended(60) == "stopped"
    assert len(run.of(AttemptPlanned)) == 3
    run.check_drained()


def test_slurmctld_killed_and_restarted(start, reference, idle_testbed):
    run = start()
    run.until_step(10)
    idle_testbed.kill_slurmctld()
    try:
        run.kill(run.pid_of(1))
        run.until("the next attempt", lambda: len(run.of(AttemptPlanned)) == 2, 40)
    finally:
        idle_testbed.restart_slurmctld()
    assert run.until_ended() == "finished"
    run.check_result(reference)
    run.check_drained()
    run.until_job_over()


def test_the_supervisor_killed_again_and_again(start, reference):
    seed = 20
    sys.stdout.write(f"seed {seed}\n")
    chance = random.Random(seed)
    kills = 20
    run = start(step_s=0.8)
    run.until_step(1)
    for _ in range(kills):
        step = run.step()
        epoch = highest_number(run.run_dir)
        run.kill(run.supervisor_pid())
        run.until("the next supervisor", lambda before=epoch: highest_number(run.run_dir) > before, 30)
        run.until("progress after the kill", lambda before=step: run.step() > before, 30)
        more = min(run.step() + chance.randint(0, 2), TARGET - 1)
        run.until("some more", lambda n=more: run.step() >= n or run.of(RunEnded), 30)
    assert run.until_ended() == "finished"
    assert len(run.of(EpochTaken)) >= kills + 1
    assert len(run.view.attempts) == 1, run.story()
    run.check_result(reference)
    run.check_drained()


def test_no_spare_left_shrinks_and_a_feeder_brings_a_replacement(start, reference, idle_testbed):
    run = start(spares=0, step_s=0.4)
    run.until_step(12)
    bad = run.plan.nodes[1]
    idle_testbed.crash_node(bad)
    run.until("the smaller layout", lambda: run.plan.layout.dp == 1, 60)
    shrunk_at = run.plan.restore_step
    assert run.until_ended(240) == "finished"
    run.check_result(reference, exact_until=shrunk_at)
    run.check_plans()
    run.check_drained()
    assert [p.plan.layout.dp for p in run.of(AttemptPlanned)] == [2, 1, 2], run.story()
    assert sum(isinstance(a, Feed) for a in run.actions) == 1
    run.until_job_over()
    idle_testbed.start_node(bad)


def test_the_batch_node_of_two_is_lost_and_the_other_trains_on(start, reference, idle_testbed):
    run = start(spares=0, feed=False)
    run.until_step(12)
    bad = run.plan.nodes[0]
    idle_testbed.crash_node(bad)
    run.until("the smaller layout", lambda: run.plan.layout.dp == 1, 90)
    shrunk_at = run.plan.restore_step
    assert run.until_ended() == "finished"
    run.check_result(reference, exact_until=shrunk_at)
    run.check_plans()
    run.check_drained()
    assert highest_number(run.run_dir) == 2
    run.until_job_over()
    idle_testbed.start_node(bad)


def test_an_allocation_that_cannot_carry_the_run_is_queued_again_without_the_bad_node(start, reference, idle_testbed):
    run = start(spares=0, nodes_min=2, feed=False)
    run.until_step(12)
    bad = run.plan.nodes[1]
    run.xid(bad, 79)
    assert run.until_ended(180) == "finished"
    run.check_result(reference)
    run.check_plans()
    run.check_drained(bad)
    assert sum(isinstance(a, Requeue) for a in run.actions) == 1
    assert bad not in run.plan.nodes
    idle_testbed.undrain(bad)


def test_the_whole_allocation_gone_is_queued_again_by_slurm(start, reference, idle_testbed):
    run = start(spares=0, feed=False)
    run.until_step(12)
    first = run.plan.nodes
    for node in first:
        idle_testbed.crash_node(node)
    assert run.until_ended(240) == "finished"
    run.check_result(reference)
    run.check_drained()
    assert not set(first) & set(run.plan.nodes)
    for node in first:
        idle_testbed.start_node(node)


def ask(run, what: str) -> None:
    """As `outlast stop` and `outlast continue` do."""
    import msgspec

    path = run.run_dir.requests / f"{what}.json"
    path.parent.mkdir(exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_bytes(msgspec.json.encode(m.OperatorAsked(at_s=0.0, what=what, who="a test")))
    draft.rename(path)


def _expand(nodes: str) -> set[str]:
    from outlast.slurm.hostlist import expand

    return set(expand(nodes))


@pytest.mark.long
def test_a_run_whose_job_ran_out_of_time_goes_on_in_a_new_job(start, reference, idle_testbed):
    from click.testing import CliRunner

    from outlast.reliability.cli.submit import submit

    run = start(spares=0, feed=False, step_s=1.5)
    run.until_step(12)
    # the time limit, told by hand: a test need not wait for a minute
    idle_testbed.run(["scontrol", "update", f"JobId={run.job}", "TimeLimit=00:00:01"])
    run.until("the job's end", lambda: run.squeue() in ("", "TIMEOUT"), 120)
    assert not run.of(RunEnded), run.story()
    done = CliRunner().invoke(submit, ["--run-dir", str(run.run_dir.root)], standalone_mode=False)
    assert done.return_value == 0, done.output
    assert run.until_ended() == "finished"
    run.check_result(reference)
    run.check_drained()


def test_before_the_time_limit_the_ranks_save_and_nothing_that_was_trained_is_lost(start, reference):
    """The limit is Slurm's own; the margin is wide, so that there is time to see what comes after."""
    run = start(step_s=0.6, walltime_s=120, checkpoint={"every_steps": 1000, "end_margin_s": 30.0})
    called = run.until(
        "the last call",
        lambda: [b for b in run.of(AttemptMoved) if b.why.startswith("save first: the allocation")],
        120,
    )
    assert "to the deadline; a save takes 60.0 s, margin 30 s" in called[0].why
    run.until("its checkpoint", lambda: [p for p in run.of(AttemptPlanned) if p.plan.restore_step], 60)
    first, second = [p.plan for p in run.of(AttemptPlanned)][:2]
    assert run.until_ended() == "finished", "a save was quick, so there was time for the rest"
    run.check_result(reference)
    done = [s.train_step for b in run.of(StepsDone) for s in b.steps]
    assert len(done) == len(set(done)), "no train_step was done twice"
    assert second.restore_step > 3 and first.nodes == second.nodes and not run.verdicts
