"""Ranks for these tests: torch and Megatron are imported once in this process, then forked for every attempt."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from outlast.launchers import trainer
from outlast.launchers.trainer_args import parse_settings

SMALL = ("--train-steps", "6", "--hidden", "32", "--seq", "16")


@dataclass(frozen=True)
class RankResult:
    """What one rank left behind."""

    code: int
    """Exit code; minus the posix signal that ended it."""
    output: str
    records: tuple[dict[str, Any], ...]
    digest: str
    """Hash of its weights and optimizer state after the last train_step; '' where it did not get there."""

    @property
    def losses(self) -> dict[int, float]:
        return {r["train_step"]: r["loss"] for r in self.records if "loss" in r}


@dataclass(frozen=True)
class AttemptResult:
    ranks: tuple[RankResult, ...]
    wall_s: float

    @property
    def codes(self) -> list[int]:
        return [rank.code for rank in self.ranks]

    @property
    def losses(self) -> dict[int, float]:
        """train_step -> loss, from the last rank, which holds it in every layout."""
        return self.ranks[-1].losses

    @property
    def digests(self) -> list[str]:
        return [rank.digest for rank in self.ranks]

    def checked(self) -> AttemptResult:
        """Itself, where every rank ended well."""
        failed = [f"rank {i} exited {r.code}:\n{r.output[-3000:]}" for i, r in enumerate(self.ranks) if r.code]
        assert not failed, "\n".join(failed)
        return self


@dataclass
class FileRecorder:
    """Writes each call as a JSON line: floats survive exactly."""

    path: Path
    phases: list[str] = field(default_factory=list)

    def _write(self, **record: object) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"at_s": time.monotonic(), **record}) + "\n")

    def phase(self, name: str) -> None:
        self._write(phase=name)

    def step_started(self, train_step: int) -> None:
        self._write(started=train_step)

    def step_done(self, train_step: int, **what: Any) -> None:
        self._write(train_step=train_step, **what)

    def step_closed(self, save_s: float = 0.0) -> None:
        self._write(closed_s=save_s)

    def checkpoint_durable(self, train_step: int, durable_s: float = 0.0) -> None:
        self._write(durable=train_step)


def _digest(training: trainer.Training) -> str:
    """Everything that the next train_step depends on, byte for byte."""
    digest = hashlib.sha256()
    for module in training.trainee.modules:
        for parameter in module.parameters():
            digest.update(parameter.detach().cpu().numpy().tobytes())
    for optimizer in training.trainee.optimizer.chained_optimizers:
        for state in optimizer.optimizer.state.values():
            for name in sorted(state):
                digest.update(state[name].detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def _be_rank(
    argv: Sequence[str], env: dict[str, str], folder: Path, leave: Sequence[str], before: Callable[[], None]
) -> int:
    """The life of a forked rank; returns its exit code."""
    rank = int(env["RANK"])
    output = os.open(folder / f"{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    os.environ.update(env)
    try:
        before()
        training = trainer.run(parse_settings(argv), os.environ, FileRecorder(folder / f"{rank}.jsonl"), leave=leave)
        (folder / f"{rank}.digest").write_text(_digest(training))
        return 0
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:  # noqa: BLE001 (whatever it is, the parent reads it from the output)
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _torchrun_env(ranks: int) -> dict[str, str]:
    port = str(_free_port())
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


class RankForker:
    """Runs attempts one after another; keeps nothing alive behind them."""

    def __init__(self, folder: Path, data_dir: Path) -> None:
        self._folder = folder
        self._data_dir = data_dir
        self._attempts = 0

    def __call__(
        self,
        *argv: str,
        ranks: int = 1,
        env: dict[str, str] | None = None,
        leave: Sequence[str] = (),
        before: Callable[[], None] = lambda: None,
        while_running: Callable[[dict[int, int], Path], None] | None = None,
        timeout_s: float = 90.0,
    ) -> AttemptResult:
        """One attempt. `before` runs in each rank first; `while_running` gets {rank: pid} and the records' folder."""
        self._attempts += 1
        folder = self._folder / f"attempt-{self._attempts}"
        folder.mkdir()
        common = {**_torchrun_env(ranks), "OUTLAST_ATTEMPT": str(self._attempts), **(env or {})}
        full = (*SMALL, "--data-dir", str(self._data_dir), "--timeout-s", "60", *argv)
        began = time.monotonic()
        pids = {}
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                code = 1
                with contextlib.suppress(BaseException):
                    code = _be_rank(full, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, folder, leave, before)
                os._exit(code)
            pids[rank] = pid
        try:
            if while_running:
                while_running(pids, folder)
            codes = _wait_for(pids, began + timeout_s)
        finally:
            _kill_all(pids)
        wall_s = time.monotonic() - began
        return AttemptResult(tuple(_collect(folder, rank, codes.get(rank, -9)) for rank in range(ranks)), wall_s)


def _wait_for(pids: dict[int, int], deadline_s: float) -> dict[int, int]:
    """Exit codes by rank; ranks that outlive another's failure by 10 s are ended, as a supervisor would."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for rank, pid in list(pids.items()):
            if rank in codes:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[rank] = os.waitstatus_to_exitcode(status)
                pids[rank] = 0
                if codes[rank]:
                    deadline_s = min(deadline_s, time.monotonic() + 10)
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.01)
    return codes


def _kill_all(pids: dict[int, int]) -> None:
    for pid in filter(None, pids.values()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _collect(folder: Path, rank: int, code: int) -> RankResult:
    def text(suffix: str) -> str:
        path = folder / f"{rank}.{suffix}"
        return path.read_text(errors="replace") if path.exists() else ""

    records = tuple(json.loads(line) for line in text("jsonl").splitlines())
    return RankResult(code, text("out"), records, text("digest"))


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpus")


@pytest.fixture(scope="session")
def fork_ranks(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Iterator[RankForker]:
    trainer.preload()
    yield RankForker(tmp_path_factory.mktemp("ranks"), data_dir)
