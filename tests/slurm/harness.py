"""Whole runs on the real testbed: submitted as a user does, broken from outside, judged by the log and by Slurm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outlast.launchers.slurm_cluster import submit
from outlast.reliability import model as m
from outlast.reliability.actions import Action
from outlast.reliability.attempt import State
from outlast.reliability.eventlog import read_events
from outlast.reliability.events import AttemptMoved, AttemptPlanned, Intent, Judged, LogEvent, RunEnded, Seen, StepsDone
from outlast.reliability.fence import highest
from outlast.reliability.freeze import freeze
from outlast.reliability.history import RunView, fold
from outlast.reliability.model import Node
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import Checkpoint, Cluster, LayoutAsked, Limits, RunFile, Task
from outlast.reliability.verdict import Verdict
from outlast.reliability.wording import tell_action, tell_signal
from outlast.slurm.testbed import Testbed

TARGET = 60
SAVE_EVERY = 10
LR = 5e-4
"""Low enough that training is stable: else rounding alone, after a change of layout, grows tenfold every few steps."""
STEP_S = 0.12
"""A train_step is slowed to about this, so that there is a "during" to break things in."""
XID = "NVRM: Xid (PCI:0000:3b:00): {code}, pid='<unknown>', name=<unknown>, {text}\n"


class Run:
    """One submitted run, and what happened to it."""

    def __init__(self, bed: Testbed, root: Path, name: str, **asked: Any) -> None:
        self.bed, self.files = bed, root / f"{name}-files"
        (self.files / "kernel").mkdir(parents=True)
        for node in bed.nodes:
            (self.files / "kernel" / node).touch()
        self.run_dir: RunDir = freeze(self._run_file(root, name, **asked), root)
        self.job = submit(self.run_dir, self._frozen(), sys.executable)

    def _run_file(self, root: Path, name: str, *, faults: str = "", step_s: float = STEP_S, **asked: Any) -> RunFile:
        slow = f"slow:rank=0:train_step=1:seconds={step_s}"
        env = {
            "OUTLAST_SAMPLE_LOG": str(self.files / "samples"),
            "OUTLAST_FAULT": "; ".join(f for f in (slow, faults.replace("%files", str(self.files))) if f),
        }
        limits = {
            "hang_floor_s": 5.0,
            "settle_s": 1.0,
            "term_grace_s": 2.0,
            "agent_silent_s": 8.0,
            "lease_s": 5.0,
            "wait_for_spare_s": 0.0,
            **asked.pop("limits", {}),
        }
        saving = {"every_steps": SAVE_EVERY, "keep_last": 3, **asked.pop("checkpoint", {})}
        cluster = {"nodes": 2, "nodes_min": 1, "spares": 1, "gpus_per_node": 0, "ranks_per_node": 1, **asked}
        return RunFile(
            name=name,
            task=Task(module="outlast.launchers.trainer", kind="reference", env=env),
            params={"data_dir": str(root / "data"), "lr": LR},
            cluster=Cluster(kind="slurm", kernel_log=str(self.files / "kernel" / "%n"), **cluster),
            layout=LayoutAsked(global_batch=8, micro_batch=2),
            train_steps=TARGET,
            checkpoint=Checkpoint(**saving),
            limits=Limits(**limits),
            run_root=str(root),
        )

    def _frozen(self) -> RunFile:
        from outlast.reliability.config import load_frozen

        return load_frozen(self.run_dir)

    # ------------------------------------------------------------ what it did

    @property
    def events(self) -> list[LogEvent]:
        return read_events(self.run_dir.events).events if self.run_dir.events.exists() else []

    def of(self, kind: type) -> list[Any]:
        return [e.body for e in self.events if isinstance(e.body, kind)]

    @property
    def view(self) -> RunView:
        return fold(self.events)

    @property
    def plan(self) -> m.Plan:
        return self.of(AttemptPlanned)[-1].plan  # type: ignore[no-any-return]

    @property
    def verdicts(self) -> list[Verdict]:
        return [j.verdict for j in self.of(Judged)]

    @property
    def actions(self) -> list[Action]:
        return [i.action for i in self.of(Intent)]

    def step(self) -> int:
        """Highest train_step of the present attempt."""
        steps = 0
        for event in self.events:
            if isinstance(event.body, AttemptPlanned):
                steps = 0
            elif isinstance(event.body, StepsDone):
                steps = max(steps, event.body.steps[-1].train_step)
        return steps

    def training(self) -> bool:
        moves = self.of(AttemptMoved)
        return bool(moves) and moves[-1].state is State.TRAINING

    def pid_of(self, rank: int) -> int:
        placed = [s.signal for s in self.of(Seen) if isinstance(s.signal, m.RankPlaced) and s.signal.rank == rank]
        return placed[-1].pid

    def supervisor_pid(self) -> int:
        seat = highest(self.run_dir)
        assert seat is not None
        return seat.pid

    # ------------------------------------------------------------ waiting and breaking

    def until(self, what: str, condition: Callable[[], Any], timeout_s: float = 90.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            time.sleep(0.1)  # between two looks at the log; the deadline decides
        raise AssertionError(f"{what}: not within {timeout_s:.0f} s\n{self.story()}")

    def until_step(self, step: int, timeout_s: float = 120.0) -> None:
        self.until(f"train_step {step}", lambda: self.training() and self.step() >= step, timeout_s)

    def until_ended(self, timeout_s: float = 150.0) -> str:
        ended = self.until("the end of the run", lambda: self.of(RunEnded), timeout_s)
        return ended[0].outcome  # type: ignore[no-any-return]

    def xid(self, node: Node, code: int, text: str = "GPU has fallen off the bus.") -> None:
        with (self.files / "kernel" / node).open("a") as log:
            log.write(XID.format(code=code, text=text))

    def kill(self, pid: int, posix_signal: int = signal.SIGKILL) -> None:
        os.kill(pid, posix_signal)

    def squeue(self) -> str:
        return self.bed.run(["squeue", "-h", "-j", str(self.job), "-o", "%T"]).strip()

    def until_job_over(self, timeout_s: float = 40.0) -> None:
        self.until("the job's end", lambda: self.squeue() in ("", "COMPLETED", "CANCELLED", "FAILED"), timeout_s)

    # ------------------------------------------------------------ what must hold

    def check_result(self, reference: dict[int, float], *, exact_until: int = TARGET) -> None:
        """The reference's losses: bit for bit up to `exact_until`, within 1e-5 relative after; each sample once."""
        losses = {s.train_step: s.loss for s in self.view.steps}
        assert sorted(losses) == list(range(1, TARGET + 1)), self.story()
        for step, loss in losses.items():
            wanted = reference[step]
            if step <= exact_until:
                assert loss == wanted, f"train_step {step}: {loss} != {wanted}\n{self.story()}"
            else:
                assert abs(loss - wanted) <= 1e-5 * abs(wanted), f"train_step {step}: {loss} != {wanted}"
        self.check_samples()

    def check_samples(self) -> None:
        from outlast.reliability.cli.demo_compare import check_samples

        count, problem = check_samples(self.files / "samples", self.view, 8)
        assert not problem and count == TARGET * 8, problem

    def check_drained(self, *nodes: str) -> None:
        """Exactly these nodes carry a reason of ours; nobody else's node is drained by us."""
        said = self.bed.run(["sinfo", "-h", "-N", "-o", "%N|%E"])
        ours = {line.split("|")[0] for line in said.splitlines() if "outlast:" in line}
        assert ours == set(nodes), said

    def check_plans(self) -> None:
        """No attempt began on a node that was convicted by then; each rank ran where planned."""
        convicted: set[Node] = set()
        plan: m.Plan | None = None
        for event in self.events:
            match event.body:
                case Judged(verdict=v) if v.convicts and v.node is not None:
                    convicted.add(v.node)
                case AttemptPlanned(plan=new):
                    plan = new
                    assert not convicted & set(plan.nodes), self.story()
                case Seen(signal=m.RankPlaced() as placed) if plan is not None and placed.attempt == plan.attempt:
                    assert {p.rank: p.node for p in plan.ranks}[placed.rank] == placed.node, self.story()

    def story(self) -> str:
        """The log in words, for a failed test."""
        lines = [f"--- {self.run_dir.root}"]
        for event in self.events:
            match event.body:
                case Seen(signal=signal):
                    text = tell_signal(signal)
                case Intent(action=action):
                    text = "intent " + tell_action(action)
                case StepsDone(steps=steps):
                    text = f"steps to {steps[-1].train_step}"
                case body:
                    text = str(body)[:300]
            lines.append(f"{event.seq:4} e{event.epoch} {event.at_s:.2f} {text}")
        for log in sorted((self.run_dir.root / "slurm").glob("*.log")):
            lines.append(f"--- {log.name}: " + log.read_text(errors="replace")[-1500:])
        return "\n".join(lines)


def ranks_left(bed: Testbed) -> list[str]:
    """Processes of ranks that still live anywhere on this host."""
    listing = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, timeout=10, check=True)
    return [line for line in listing.stdout.splitlines() if "outlast.launchers.warm" in line]


def losses_of(run: Run) -> dict[int, float]:
    return {s.train_step: s.loss for s in run.view.steps if s.loss is not None}


def save_losses(path: Path, losses: dict[int, float]) -> None:
    path.write_text(json.dumps({str(k): v.hex() for k, v in losses.items()}))
