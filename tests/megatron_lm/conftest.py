"""Megatron-LM under a real supervisor: agents, warm processes and ranks on the local cluster, one rank a node.

Every run trains 16 steps and saves every 4; what differs is the fault. The tree is the stand-in of this directory, or
the work tree that OUTLAST_MEGATRON_LM names.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from outlast.checkpoint.manifest import decode_manifest
from outlast.launchers.local import LocalCluster
from outlast.reliability import model as m
from outlast.reliability.cli.ask import write_request
from outlast.reliability.cli.compose import run_supervisor
from outlast.reliability.config import load_frozen
from outlast.reliability.eventlog import read_events
from outlast.reliability.events import LogEvent, Seen, StepsDone
from outlast.reliability.freeze import freeze
from outlast.reliability.history import RunView, fold
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import Checkpoint, Cluster, LayoutAsked, Limits, RunFile, Task

HERE = Path(__file__).parent
STANDIN = HERE / "standin"
STEPS, EVERY = 16, 4
LIMIT_S = 90.0
PARAMS: dict[str, str | int | float | bool | None] = {
    "use_mcore_models": True,
    "transformer_impl": "local",
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "position_embedding_type": "rope",
    "normalization": "LayerNorm",
    "use_cpu_initialization": True,
    "no_persist_layer_norm": True,
    "no_gradient_accumulation_fusion": True,
    "no_masked_softmax_fusion": True,
    "no_bias_gelu_fusion": True,
    "no_bias_dropout_fusion": True,
    "no_rope_fusion": True,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "attention_backend": "unfused",
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 255,
    "num_workers": 0,
    "lr": 1e-3,
    "min_lr": 1e-4,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 2,
    "clip_grad": 1.0,
    "log_interval": 1,
    "eval_interval": 1000,
    "eval_iters": 0,
    "seed": 1234,
    "rerun_mode": "validate_results",
}


@dataclass(frozen=True)
class Ended:
    """A run that is over."""

    run_dir: RunDir
    exit_code: int
    view: RunView
    events: tuple[LogEvent, ...]

    @property
    def losses(self) -> dict[int, float | None]:
        """train_step -> loss of the lineage that counts; exact floats."""
        return {step.train_step: step.loss for step in self.view.steps}

    @property
    def exits(self) -> list[m.RankExited]:
        return [
            e.body.signal for e in self.events if isinstance(e.body, Seen) and isinstance(e.body.signal, m.RankExited)
        ]

    @property
    def nodes(self) -> list[tuple[str, ...]]:
        """Of each attempt, in rank order."""
        return [tuple(attempt.plan.nodes) for attempt in self.view.attempts]

    @property
    def restored(self) -> list[int]:
        return [attempt.plan.restore_step for attempt in self.view.attempts]

    def weights(self, train_step: int = STEPS) -> dict[str, str]:
        """Shard -> hash, of a committed checkpoint: parameters, optimizer and generators of all ranks."""
        raw = (Path(self.checkpoint_dir) / f"iter_{train_step:07d}" / "manifest.json").read_bytes()
        files = decode_manifest(raw).files
        return {name: entry.xxh3_128 for name, entry in files.items() if name.endswith(".distcp")}

    @property
    def checkpoint_dir(self) -> str:
        return load_frozen(self.run_dir).checkpoint.dir

    def log(self, attempt: int, rank: int) -> str:
        """What this rank printed."""
        return (self.run_dir.rank(attempt, m.Rank(rank)) / "log").read_text(errors="replace")

    def calls(self, attempt: int, rank: int) -> list[str]:
        """The traced functions of Megatron-LM, in the order in which this rank called them."""
        name = self.run_dir.name.rsplit("-", 1)[0]
        lines = (self.run_dir.root.parent / f"{name}-files" / f"trace-{rank}").read_text().splitlines()
        return [line.split()[1] for line in lines if line.split()[0] == str(attempt)]

    def said(self) -> str:
        """What the ranks printed, for the message of a test that fails."""
        logs = sorted(self.run_dir.root.glob("attempts/*/ranks/*/log"))
        return "\n".join(f"==> {log}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


class Runs:
    """Starts runs of one tree."""

    def __init__(self, tree: Path, place: Path) -> None:
        self.tree, self.place = tree, place

    def __call__(
        self,
        name: str,
        *,
        fault: str = "",
        spares: int = 0,
        checkpoint_dir: str = "",
        stop_after: int = 0,
        params: dict[str, str | int | float | bool | None] | None = None,
    ) -> Ended:
        """One run, to its end; asked to stop once the train_step `stop_after` is in the log."""
        files = self.place / f"{name}-files"
        files.mkdir()
        for node in "abc":
            (files / f"{node}.kmsg").touch()
        asked = self._run_file(name, fault, files, spares, checkpoint_dir)
        run_dir = freeze(msgspec.structs.replace(asked, params={**PARAMS, **(params or {})}), self.place)
        cluster = LocalCluster(run_dir, load_frozen(run_dir))
        with _limit(LIMIT_S):
            look = _stopper(run_dir, stop_after) if stop_after else None
            code = run_supervisor(run_dir, why="test", cluster=cluster, on_event=look)
        events = tuple(read_events(run_dir.events).events)
        return Ended(run_dir, code, fold(events), events)

    def _run_file(self, name: str, fault: str, files: Path, spares: int, checkpoint_dir: str) -> RunFile:
        env = {"PYTHONPATH": str(HERE), "MLM_FAULT_DIR": str(files), "MLM_TRACE": "1", "MLM_FAULT": fault}
        return RunFile(
            name=name,
            task=Task(
                script=str(self.tree / "pretrain_gpt.py"),
                kind="megatron_lm",
                env=env,
                preload=("torch", "outlast.launchers.megatron_lm_warm", "mlm_faults"),
            ),
            params=PARAMS,
            cluster=Cluster(
                kind="local", nodes=2, spares=spares, ranks_per_node=1, kernel_log=str(files / "%n.kmsg"), feed=False
            ),
            layout=LayoutAsked(global_batch=8, micro_batch=2),
            train_steps=STEPS,
            checkpoint=Checkpoint(every_steps=EVERY, keep_last=5, dir=checkpoint_dir),
            limits=Limits(
                term_grace_s=8.0,
                kill_grace_s=5.0,
                settle_s=0.3,
                hang_floor_s=60.0,
                agent_silent_s=8.0,
                lease_s=10.0,
                start_timeout_s=60.0,
                wait_for_spare_s=5.0,
                hold_max_s=0.5,
            ),
            run_root=str(self.place),
        )


@contextmanager
def _limit(limit_s: float) -> Iterator[None]:
    """A supervisor that takes longer is told to end; the run is then cancelled and the test sees that."""
    timer = threading.Timer(limit_s, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _stopper(run_dir: RunDir, train_step: int) -> Callable[[LogEvent], None]:
    """`outlast stop`, once this step is in the log."""
    asked: list[int] = []

    def look(event: LogEvent) -> None:
        if isinstance(event.body, StepsDone) and event.body.steps[-1].train_step >= train_step and not asked:
            asked.append(train_step)
            write_request(run_dir, "stop", "a test")

    return look


def _real_tree() -> Path:
    named = os.environ.get("OUTLAST_MEGATRON_LM", "")
    if not named or not (Path(named) / "pretrain_gpt.py").is_file():
        pytest.fail("OUTLAST_MEGATRON_LM: expected a work tree of Megatron-LM core_v0.16.1, found " + repr(named))
    return Path(named)


TREES = [
    pytest.param("standin", marks=[pytest.mark.slow, pytest.mark.megatron]),
    pytest.param("megatron_lm", marks=pytest.mark.megatron_lm),
]


@pytest.fixture(scope="module", params=TREES)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of the stand-in, and of the real thing where it is there."""
    tree = STANDIN if request.param == "standin" else _real_tree()
    return Runs(tree, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def reference(runs: Runs) -> Ended:
    """The undisturbed run."""
    return runs("reference")


@pytest.fixture(scope="session")
def real_tree() -> Path:
    return _real_tree()


@pytest.fixture(scope="session")
def make_runs() -> type[Runs]:
    return Runs
