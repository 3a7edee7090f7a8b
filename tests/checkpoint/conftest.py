"""Ranks for the tests of this folder: forked from the test's own process, which imported Megatron once."""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

RUN_S = 60.0


@dataclass
class Ranks:
    """What came of each rank: its return value, or its exception, or how it ended."""

    values: dict[int, Any]
    errors: dict[int, BaseException]
    exits: dict[int, int]

    def value(self, rank: int = 0) -> Any:
        assert not self.errors, f"{self.errors}"
        return self.values[rank]


RunRanks = Callable[..., Ranks]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The fast tests do not wait five seconds for an import of Megatron that all its users are deselected from."""
    heavy = collection_path.name in ("test_saver.py", "test_engine_saves.py", "test_dcp_saver.py", "test_tier_saver.py")
    return True if heavy and "not slow" in config.option.markexpr else None


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """run_ranks(world_size, body): `body(rank)` in forked gloo ranks, all of them gone when it returns."""
    import torch

    torch.set_num_threads(1)
    count = iter(range(1000))

    def run(world_size: int, body: Callable[[int], Any], *, timeout_s: float = RUN_S) -> Ranks:
        folder = tmp_path / f"ranks{next(count)}"
        folder.mkdir()
        pids = {rank: _fork_rank(rank, world_size, folder, body) for rank in range(world_size)}
        exits = _wait_all(pids, timeout_s)
        values, errors = {}, {}
        for rank in pids:
            said = folder / f"{rank}.pickle"
            if said.exists():
                kind, content = pickle.loads(said.read_bytes())
                (values if kind == "value" else errors)[rank] = content
        return Ranks(values=values, errors=errors, exits=exits)

    return run


def _fork_rank(rank: int, world_size: int, folder: Path, body: Callable[[int], Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
        _say(folder, rank, "value", body(rank))
        code = 0
    except BaseException as e:  # noqa: BLE001 -- the end of the process
        traceback.print_exc()
        _say(folder, rank, "error", e)
    finally:
        os._exit(code)


def _say(folder: Path, rank: int, kind: str, content: Any) -> None:
    try:
        raw = pickle.dumps((kind, content))
        pickle.loads(raw)
    except Exception:  # noqa: BLE001 -- an exception with its own signature does not unpickle
        raw = pickle.dumps((kind, RuntimeError(f"{type(content).__name__}: {content}")))
    (folder / f"{rank}.pickle").write_bytes(raw)


def _wait_all(pids: dict[int, int], timeout_s: float) -> dict[int, int]:
    deadline = time.monotonic() + timeout_s
    left = dict(pids)
    exits: dict[int, int] = {}
    try:
        while left:
            assert time.monotonic() < deadline, f"ranks {sorted(left)} did not end within {timeout_s:.0f} s"
            for rank, pid in list(left.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    exits[rank] = os.waitstatus_to_exitcode(status)
                    del left[rank]
            time.sleep(0.005)
    finally:
        for pid in left.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return exits
