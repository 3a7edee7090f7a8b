"""Who is measured by the checkpoint bench: each saves and loads the same state in its own way, as its docs say.

A peer that does not make its files durable gets an fsync of each: in the hold where it saves synchronously, in a
thread where it does not. Nobody is crippled: what a peer keeps between saves (a process, staging memory) is kept.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from outlast.checkpoint import reader
from outlast.checkpoint.writer import Saver
from outlast.reliability.model import Layout

State = dict[str, torch.Tensor]
"""This rank's rows of each matrix."""


def sync_files(place: Path) -> None:
    for path in [*place.rglob("*"), place]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def as_dtensors(state: State) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: DTensor.from_local(rows, mesh, [Shard(0)]) for name, rows in state.items()}


def as_sharded(state: State) -> dict[str, Any]:
    cut = (0, dist.get_rank(), dist.get_world_size())
    return {name: ShardedTensor.from_rank_offsets(name, rows, cut) for name, rows in state.items()}


class Method:
    """One way to save. A save is begin(), then poll() on all ranks alike until done, then end()."""

    name = ""
    is_async = False
    reshards = False

    def __init__(self, place: Path) -> None:
        self.place = place
        self.durable_at_s = 0.0
        """Monotonic; 0 while it is not."""

    def open(self, state: State) -> None:
        """Before the clock runs: what is made once for many saves."""

    def begin(self, state: State) -> None:
        raise NotImplementedError

    def poll(self) -> None:
        """From time to time, between the pieces of a train_step."""

    def before_update(self) -> None:
        """The state is about to change."""

    def end(self) -> None:
        """After it was durable."""

    def close(self) -> None:
        """After the last save of a round."""

    def load(self, state: State) -> None:
        """Into `state`."""
        raise NotImplementedError

    def now_durable(self) -> None:
        self.durable_at_s = self.durable_at_s or time.monotonic()

    def fresh(self) -> Path:
        """An empty directory for one save."""
        if dist.get_rank() == 0:
            shutil.rmtree(self.place, ignore_errors=True)
            self.place.mkdir(parents=True)
        dist.barrier()
        return self.place


class TorchSave(Method):
    name = "torch.save"

    def begin(self, state: State) -> None:
        path = self.place / f"{dist.get_rank()}.pt"
        torch.save(state, path)
        sync_files(path.parent)
        self.now_durable()

    def load(self, state: State) -> None:
        for name, rows in torch.load(self.place / f"{dist.get_rank()}.pt").items():
            state[name].copy_(rows)


class DcpSave(Method):
    name = "DCP save"
    reshards = True

    def begin(self, state: State) -> None:
        dcp.save(as_dtensors(state), checkpoint_id=self.place)
        self.now_durable()

    def load(self, state: State) -> None:
        dcp.load(as_dtensors(state), checkpoint_id=self.place)


class DcpAsync(DcpSave):
    is_async = True
    kind = AsyncCheckpointerType.THREAD
    name = "DCP async thread"

    group: Any = None

    def begin(self, state: State) -> None:
        if self.group is None:
            self.group = dist.new_group(backend="gloo")  # its collectives run in a thread beside the training's
        answer = dcp.async_save(
            as_dtensors(state),
            checkpoint_id=self.place,
            async_checkpointer_type=self.kind,
            async_stager=self.stager(),
            process_group=self.group,
        )
        self.staging = getattr(answer, "staging_completion", None)
        self.future = getattr(answer, "upload_completion", answer)
        self.future.add_done_callback(lambda _: self.now_durable())

    def stager(self) -> Any:
        return None

    def before_update(self) -> None:
        if self.staging is not None:
            self.staging.result()
            self.staging = None

    def end(self) -> None:
        self.future.result()


class DcpProcess(DcpAsync):
    name = "DCP async process"
    kind = AsyncCheckpointerType.PROCESS


class DcpShared(DcpProcess):
    name = "DCP async process, shared memory"
    kept: Any = None

    def stager(self) -> Any:
        if self.kept is None:
            self.kept = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=True,
                    use_async_staging=True,
                    use_non_blocking_copy=False,
                )
            )
        return self.kept


class MegatronSave(Method):
    name = "Megatron sync"
    reshards = True

    def begin(self, state: State) -> None:
        dist_checkpointing.save(as_sharded(state), str(self.place), get_default_save_sharded_strategy("torch_dist"))
        self.now_durable()

    def load(self, state: State) -> None:
        loaded = dist_checkpointing.load(as_sharded(state), str(self.place))
        for name, rows in loaded.items():
            if rows.data_ptr() != state[name].data_ptr():
                state[name].copy_(rows)


class MegatronAsync(MegatronSave):
    name = "Megatron async"
    is_async = True

    def begin(self, state: State) -> None:
        strategy = get_default_save_sharded_strategy("torch_dist")
        request = dist_checkpointing.save(as_sharded(state), str(self.place), strategy, async_sharded_save=True)
        self.queue = AsyncCallsQueue(persistent=False)
        self.queue.schedule_async_request(request)

    def poll(self) -> None:
        if not self.durable_at_s and self.queue.maybe_finalize_async_calls(blocking=False):
            self.now_durable()

    def end(self) -> None:
        self.queue.close()


class SnapshotAsync(Method):
    name = "torchsnapshot async"
    is_async = True

    def begin(self, state: State) -> None:
        from torchsnapshot import Snapshot, StateDict

        pending = Snapshot.async_take(str(self.place), {"s": StateDict(**state)})

        def make_durable() -> None:
            pending.wait()
            sync_files(self.place)
            self.now_durable()

        self.thread = threading.Thread(target=make_durable)
        self.thread.start()

    def end(self) -> None:
        self.thread.join()

    def load(self, state: State) -> None:
        from torchsnapshot import Snapshot, StateDict

        Snapshot(str(self.place)).restore({"s": StateDict(**state)})


class Ours(Method):
    name = "outlast"
    is_async = True
    reshards = True
    overlap = False
    saver: Saver | None = None
    train_step = 1

    def open(self, state: State) -> None:
        self.saver = Saver(self.place, on_durable=self._note)
        self.saver.prepare(self.shape(state))

    def shape(self, state: State) -> dict[str, Any]:
        return as_sharded(state)

    def _note(self, train_step: int, hold_s: float, durable_s: float) -> None:
        # rank 0's writer has the time of the commit; the others only saw it in a poll
        self.durable_at_s = self.began_s + (durable_s if dist.get_rank() == 0 else 0.0)

    def begin(self, state: State) -> None:
        assert self.saver is not None
        self.began_s = time.monotonic()
        self.saver.save(
            self.shape(state),
            train_step=self.train_step,
            samples=1,
            layout=Layout(dp=dist.get_world_size()),
            overlap=self.overlap,
        )

    def before_update(self) -> None:
        assert self.saver is not None
        self.saver.finish_copy()

    def poll(self) -> None:
        assert self.saver is not None
        if not self.durable_at_s:
            self.saver.poll()

    def close(self) -> None:
        if self.saver is not None:
            self.saver.close()
        self.saver = None

    def load(self, state: State) -> None:
        loaded, _ = reader.load(as_sharded(state), self.place / f"iter_{self.train_step:07d}")
        for name, rows in loaded.items():
            if rows.data_ptr() != state[name].data_ptr():
                state[name].copy_(rows)


class OursOverlapped(Ours):
    name = "outlast, overlapped"
    overlap = True


class OursWithFingerprints(Ours):
    """A DCP state: durable is when its fingerprints are."""

    name = "outlast, DCP with fingerprints"

    def shape(self, state: State) -> dict[str, Any]:
        return as_dtensors(state)

    def _note(self, train_step: int, hold_s: float, durable_s: float) -> None:
        self.now_durable()

    def load(self, state: State) -> None:
        reader.load_dcp(as_dtensors(state), self.place / f"iter_{self.train_step:07d}")


METHODS: tuple[type[Method], ...] = (
    TorchSave,
    DcpSave,
    DcpAsync,
    DcpProcess,
    DcpShared,
    MegatronSave,
    MegatronAsync,
    SnapshotAsync,
    Ours,
    OursOverlapped,
    OursWithFingerprints,
)
