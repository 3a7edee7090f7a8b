"""The demo's two runs: one undisturbed, one that is broken three times while it trains.

Nothing here helps the run along: faults are put where a real one would show (a line in a kernel log, an exception in
the script, a node's processes killed), and what follows is the supervisor's doing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from outlast.reliability import model as m
from outlast.reliability.cli.demo_compare import Comparison, compare
from outlast.reliability.cli.demo_stage import LocalStage, SlurmStage, Stage
from outlast.reliability.eventlog import read_events
from outlast.reliability.events import LogEvent, RunStarted, StepsDone
from outlast.reliability.freeze import freeze
from outlast.reliability.history import RunView, fold
from outlast.reliability.model import Node
from outlast.reliability.narrate import Narrator
from outlast.reliability.report import write_report
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import Checkpoint, Cluster, LayoutAsked, Limits, RunFile, Task

TARGET = 60
GLOBAL_BATCH = 8
LR = 5e-4
"""Low enough for stable training: else rounding alone grows tenfold every few steps after a change of layout."""
SAVE_EVERY = 10
XID_AT, EXCEPTION_AT, CRASH_AT = 24, 37, 48
XID_LINE = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"


@dataclass
class Outcome:
    """What the demo found."""

    run_dir: RunDir
    view: RunView
    comparison: Comparison
    report: Path
    exit_code: int

    @property
    def right(self) -> bool:
        """The run ended at its target with the reference's result."""
        return self.exit_code == 0 and self.comparison.right


@dataclass
class Breaker:
    """Breaks the run at given train_steps, each once, by what the event log shows."""

    scratch: Path
    crash: Callable[[Node], None]
    narrate: Callable[[LogEvent], None]
    done: set[str] = field(default_factory=set)
    plan: m.Plan | None = None

    def on_event(self, event: LogEvent) -> None:
        self.narrate(event)
        match event.body:
            case StepsDone(steps=steps) if steps:
                self._at(steps[-1].train_step)
            case _:
                self.plan = getattr(event.body, "plan", self.plan)

    def _at(self, train_step: int) -> None:
        if train_step >= XID_AT and "xid" not in self.done:
            self.done.add("xid")
            assert self.plan is not None, "steps come after a plan"
            with kernel_log(self.scratch, self.plan.nodes[0]).open("a") as log:
                log.write(XID_LINE)
        if train_step >= CRASH_AT and "crash" not in self.done:
            self.done.add("crash")
            assert self.plan is not None, "steps come after a plan"
            self.crash(self.plan.nodes[-1])


def kernel_log(scratch: Path, node: Node) -> Path:
    """What stands for the node's /dev/kmsg."""
    return scratch / f"{node}.kmsg"


class Demo:
    """Both runs, one after the other."""

    def __init__(self, directory: Path, *, slurm: bool, say: Callable[[str], None]) -> None:
        self.directory, self.say = directory.absolute(), say
        self.stage: Stage = SlurmStage(say) if slurm else LocalStage()
        self._narrator = Narrator(TARGET)

    def run(self) -> Outcome:
        try:
            return self._run()
        finally:
            self.stage.close()

    def _run(self) -> Outcome:
        first, second, spare = self.stage.nodes
        self.say(
            f"outlast demo: GPT of 0.25 M parameters, tp 2 x dp 2, nodes {first} {second} + spare {spare}, "
            f"{TARGET} train_steps, {'Slurm on this host' if self.stage.kind == 'slurm' else 'local cluster'}"
        )
        self.say("\nthe reference: undisturbed")
        self.directory.mkdir(parents=True, exist_ok=True)
        files = Path(tempfile.mkdtemp(prefix="demo-files-", dir=self.directory))
        reference = self._prepare("demo-reference", files / "reference")
        code = self.stage.supervise(reference, self._narrate)
        if code:
            raise click_error(f"the undisturbed run ended with exit code {code}; see {reference.root}")
        self.say("\nthe same again, broken three times")
        broken = self._prepare("demo", files / "broken")
        breaker = Breaker(files / "broken", self.stage.crash, self._narrate)
        code = self.stage.supervise(broken, breaker.on_event)
        view = fold(read_events(broken.events).events)
        comparison = compare(
            fold(read_events(reference.events).events), view, files / "broken" / "samples", global_batch=GLOBAL_BATCH
        )
        return Outcome(broken, view, comparison, write_report(broken), code)

    def _narrate(self, event: LogEvent) -> None:
        if isinstance(event.body, RunStarted):
            self._narrator = Narrator(TARGET)
        for line in self._narrator.lines(event):
            self.say(f" {line}")

    def _prepare(self, name: str, scratch: Path) -> RunDir:
        (scratch / "samples").mkdir(parents=True)
        for node in self.stage.nodes:
            kernel_log(scratch, node).touch()
        return freeze(self._run_file(name, scratch), self.directory)

    def _run_file(self, name: str, scratch: Path) -> RunFile:
        env = {"OUTLAST_SAMPLE_LOG": str(scratch / "samples")}
        if name == "demo":
            env["OUTLAST_FAULT"] = f"exception:rank=1:train_step={EXCEPTION_AT}:once={scratch}/exception-raised"
        return RunFile(
            name=name,
            task=Task(module="outlast.launchers.trainer", kind="reference", env=env),
            cluster=Cluster(
                kind=self.stage.kind,
                nodes=2,
                nodes_min=1,
                spares=1,
                ranks_per_node=2,
                kernel_log=str(scratch / "%n.kmsg"),
                feed=False,
            ),
            layout=LayoutAsked(tp=2, global_batch=GLOBAL_BATCH),
            train_steps=TARGET,
            checkpoint=Checkpoint(every_steps=SAVE_EVERY, keep_last=3),
            limits=Limits(
                wait_for_spare_s=0.0,
                hang_floor_s=20.0,
                agent_silent_s=8.0,
                lease_s=10.0,
                settle_s=1.0,
                term_grace_s=1.0,
                start_timeout_s=120.0,
            ),
            params={"lr": LR},
            run_root=str(self.directory),
        )


def click_error(text: str) -> Exception:
    import click

    return click.ClickException(text)
