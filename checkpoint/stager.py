"""In a rank: lay a share out, copy it into staging memory, and keep the process that writes it from there.

`Stager` owns the memory and remembers layouts: a state that lies as the last one did needs no exchange of places, and
rank 0 makes no new index. `WriterProcess` owns the process. When to save, and what the ranks agree on, is writer.py's.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch.distributed as dist
from torch.distributed.checkpoint.storage import WriteResult

from outlast.checkpoint.background import Background, Link, Stage
from outlast.checkpoint.blocks import round_up
from outlast.checkpoint.commit import Reach
from outlast.checkpoint.engine import serve
from outlast.checkpoint.image import Copier, Copying, Framer, Image, Piece, lay_out, write_now
from outlast.checkpoint.job import Region
from outlast.checkpoint.manifest import FileEntry
from outlast.checkpoint.megatron_plan import INDEX, Share, add_up, encode_format, pickle_index
from outlast.checkpoint.ops import RealOps
from outlast.checkpoint.staging import Staging

FORMAT: Final = "metadata.json"
ROOM_FOR_CHANGES: Final = 64 << 10
"""Objects (generator states, counters) may grow by a few bytes: no new mapping for that."""


@dataclass
class Ready:
    """A share that is being copied, or was: what its writer needs to know of it."""

    image_bytes: int = 0
    shards: tuple[Region, ...] = ()
    index: tuple[Region, ...] = ()
    written: dict[str, FileEntry] = field(default_factory=dict)
    copying: Copying | None = None
    error: Exception | None = None

    def wait(self) -> None:
        """Until the live state is not needed any more. Raises what went wrong."""
        if self.copying is not None:
            self.copying.wait()
        if self.error is not None:
            raise self.error

    def drop(self) -> None:
        """Wait, and care for nothing."""
        if self.copying is not None:
            self.copying.join()


class Stager:
    """One rank's staging memory, and the layouts that were agreed on."""

    def __init__(self, group: dist.ProcessGroup, *, limit_bytes: int | None) -> None:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
        self._group = group
        self._staging = Staging(limit_bytes, ranks_here=ranks_here)
        self._framer = Framer()
        self._copier: Copier | None = None
        self._places: list[WriteResult] | None = None
        """Of this rank, as all ranks' were last exchanged."""
        self._index = b""
        """Rank 0: the shard index of those places."""

    @property
    def staging_fd(self) -> int:
        return self._staging.fd

    def prepare(self, share: Share) -> int:
        """Make the memory and the index for such a share, if it fits. Collective."""
        image = lay_out(share, self._framer)
        self._exchange(share, image)
        self._add_index(image)
        if not self._staging.why_not(image.size_bytes):
            self._map(image.size_bytes)
        return image.size_bytes

    def stage(self, share: Share, directory: Path, *, syncs: bool, overlap: bool) -> tuple[str, Ready | None]:
        """Begin to copy a share, or write it at once where it does not fit. Collective.

        Why it did not fit ('' where it did), and what is ready; None where it is not to be saved then.
        """
        image = lay_out(share, self._framer)
        short = self._staging.why_not(image.size_bytes + len(self._index) + ROOM_FOR_CHANGES)
        moved, short_ranks = add_up(self._group, self._places != image.results, bool(short))
        if short_ranks and not syncs:
            return short or f"does not fit on {short_ranks} other ranks", None
        if moved:
            self._exchange(share, image)
        shards = tuple(image.regions)
        try:
            if short:
                written = write_now(RealOps(), directory, image)
                image = Image()
                index = self._add_index(image)
                ready = Ready(written=written, index=index)
            else:
                ready = Ready(shards=shards, index=self._add_index(image))
            ready.image_bytes = image.size_bytes
            copier = self._map(image.size_bytes)
            ready.copying = Copying(copier, image) if overlap else None
            if not overlap:
                copier.copy(image)
        except (OSError, RuntimeError) as e:
            return short, Ready(error=e)
        return short, ready

    def close(self) -> None:
        self._copier = None
        self._staging.close()

    def _exchange(self, share: Share, image: Image) -> None:
        """Rank 0 learns where everything lies. Collective."""
        first = dist.get_rank() == 0
        gathered: list[list[WriteResult]] | None = [[]] * dist.get_world_size(self._group) if first else None
        dist.gather_object(image.results, gathered, dst=0, group=self._group)
        if gathered is not None:
            assert share.planned.index is not None, "rank 0 planned it"
            self._index = pickle_index(share.planned.index, [result for one in gathered for result in one])
        self._places = image.results

    def _add_index(self, image: Image) -> tuple[Region, ...]:
        if not self._index:
            return ()
        contents = ((INDEX, self._index), (FORMAT, encode_format()))
        return tuple(image.add(name, len(content), [Piece(0, content)]) for name, content in contents)

    def _map(self, size_bytes: int) -> Copier:
        if self._copier is None or size_bytes > self._staging.size_bytes:
            self._copier = None  # it holds the old mapping
            self._copier = Copier(self._staging.grow(round_up(size_bytes + ROOM_FOR_CHANGES)))
        return self._copier


class WriterProcess:
    """The process that writes for this rank: there from the beginning, and anew after one that was ended."""

    def __init__(self, staging_fd: int, *, outlive_s: float, reach: Reach | None) -> None:
        """reach: a drill's own, which only a fork can take along."""
        self._staging_fd, self._outlive_s, self._reach = staging_fd, outlive_s, reach
        self._process: Background | None = None
        self.start()

    def start(self) -> None:
        """Does nothing while one lives."""
        if self._process is not None and not self._process.is_gone():
            return
        self.end()
        if self._reach is not None:
            self._process = Background(self._serve, name="ckpt", outlives=True)
        else:
            argv = [sys.executable, "-P", "-m", "outlast.checkpoint.engine", str(self._staging_fd)]
            self._process = Background(
                name="ckpt", argv=[*argv, str(self._outlive_s)], pass_fds=[self._staging_fd], outlives=True
            )

    def _serve(self, link: Link) -> None:
        assert self._reach is not None
        _close_all_but(*link.fds, self._staging_fd)
        serve(link, self._staging_fd, reach=self._reach, outlive_s=self._outlive_s)

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def hand(self, job: bytes) -> None:
        assert self._process is not None, "it was started"
        self._process.answer(job)

    def look(self) -> tuple[Stage, str]:
        """How far it is, and for FAILED why."""
        if self._process is None:
            return Stage.FAILED, "there is no writer process"
        stage = self._process.stage()
        if stage is Stage.FAILED:
            return stage, self._process.result().decode("utf-8", "replace")
        return stage, ""

    def how_it_ended(self) -> str:
        """'' while it lives."""
        return self._process.how_it_ended() if self._process else "was ended"

    def result(self) -> bytes:
        assert self._process is not None, "it was started"
        return self._process.result()

    def end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


def _close_all_but(*fds: int) -> None:
    """In a fork: a rank's connections must end with the rank, not with its writer."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in fds:
            with suppress(OSError):
                os.close(int(name))
