"""In a rank: lay a share out, make room for it in staging memory, and keep the process that writes it from there.

`Stager` owns the memory and remembers layouts: a state that lies as the last one did needs no exchange of places, and
rank 0 makes no new index. `WriterProcess` owns the process. What the ranks agree on is drafting.py's.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import Final

import msgspec
import torch.distributed as dist
from torch.distributed.checkpoint.storage import WriteResult

from outlast.checkpoint.background import NONE, Background, Link, Stage
from outlast.checkpoint.blocks import round_up
from outlast.checkpoint.commit import Reach
from outlast.checkpoint.copying import Copier
from outlast.checkpoint.engine import serve
from outlast.checkpoint.image import Framer, Image, Piece, lay_out
from outlast.checkpoint.job import Region, Room, SaveJob
from outlast.checkpoint.share import INDEX, Share, pickle_index
from outlast.checkpoint.staging import Staging

FORMAT: Final = "metadata.json"
ROOM_FOR_CHANGES: Final = 64 << 10
"""Objects (generator states, counters) may grow by a few bytes: no new mapping for that."""
ROOM_S: Final = 30.0
"""For a process to start and to map the staging memory."""
PAUSE_S: Final = 0.005


class Stager:
    """One rank's staging memory, and where everything lay in the last save."""

    def __init__(self, group: dist.ProcessGroup, *, limit_bytes: int | None) -> None:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
        self._group = group
        self._staging = Staging(limit_bytes, ranks_here=ranks_here)
        self._framer = Framer()
        self._copier: Copier | None = None
        self._places: list[WriteResult] | None = None
        """Of this rank, as all ranks' were last exchanged."""
        self._index = b""
        self._format_file: bytes | None = None
        """Rank 0: the shard index of those places."""

    @property
    def staging_fd(self) -> int:
        return self._staging.fd

    def lay_out(self, share: Share) -> tuple[Image, bool, str]:
        """Where everything lies; whether that is elsewhere than last time; why it does not fit ('' where it does)."""
        image = lay_out(share, self._framer)
        short = self._staging.why_not(image.size_bytes + len(self._index) + ROOM_FOR_CHANGES)
        return image, self._places != image.results, short

    def exchange(self, share: Share, image: Image) -> None:
        """Rank 0 learns where everything lies. Collective."""
        first = dist.get_rank() == 0
        gathered: list[list[WriteResult]] | None = [[]] * dist.get_world_size(self._group) if first else None
        dist.gather_object(image.results, gathered, dst=0, group=self._group)
        if gathered is not None:
            assert share.planned.index is not None, "rank 0 planned it"
            self._format_file = share.planned.format_file
            self._index = pickle_index(share.planned.index, [result for one in gathered for result in one])
        self._places = image.results

    def add_index(self, image: Image) -> tuple[Region, ...]:
        """On rank 0, what is written after all shards."""
        if not self._index:
            return ()
        contents = [(INDEX, self._index), *([(FORMAT, self._format_file)] if self._format_file else [])]
        return tuple(image.add(name, len(content), [Piece(0, content)]) for name, content in contents)

    def make_room(self, size_bytes: int) -> Copier:
        """Staging memory for an image of this size. OSError where the kernel refuses."""
        if self._copier is None or size_bytes > self._staging.size_bytes:
            self._copier = None  # it holds the old mapping
            self._copier = Copier(self._staging.grow(round_up(size_bytes + ROOM_FOR_CHANGES)))
        return self._copier

    def close(self) -> None:
        self._copier = None
        self._staging.close()


class WriterProcess:
    """The process that writes for this rank: there from the beginning, and anew after one that was ended."""

    def __init__(self, staging_fd: int, *, outlive_s: float, reach: Reach | None) -> None:
        """reach: a drill's own, which only a fork can take along."""
        self._staging_fd, self._outlive_s, self._reach = staging_fd, outlive_s, reach
        self._process: Background | None = None
        self._arrivals_fd = NONE
        """An eventfd that counts the bytes of the image that have been copied: one for each process, so that what was
        copied for one that is gone is not counted by the next."""
        self.start()

    def start(self) -> None:
        """Does nothing while one lives."""
        if self._process is not None and not self._process.is_gone():
            return
        self.end()
        self._arrivals_fd = os.eventfd(0)
        if self._reach is not None:
            self._process = Background(self._serve, name="ckpt", outlives=True)
        else:
            fds = (self._staging_fd, self._arrivals_fd)
            argv = [sys.executable, "-P", "-m", "outlast.checkpoint.engine", *map(str, fds), str(self._outlive_s)]
            self._process = Background(name="ckpt", argv=argv, pass_fds=fds, outlives=True)

    def _serve(self, link: Link) -> None:
        assert self._reach is not None
        _close_all_but(*link.fds, self._staging_fd, self._arrivals_fd)
        serve(link, self._staging_fd, self._arrivals_fd, reach=self._reach, outlive_s=self._outlive_s)

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def hand(self, job: SaveJob | Room) -> None:
        """It begins at once, and goes on as far as is announced."""
        assert self._process is not None, "it was started"
        self._process.answer(msgspec.json.encode(job))

    def make_room(self, room: Room) -> None:
        """Before training: a process that has the memory mapped is as quick at the first save as later."""
        self.hand(room)
        deadline_s = time.monotonic() + ROOM_S
        while self.look()[0] is Stage.WORKING and time.monotonic() < deadline_s:
            time.sleep(PAUSE_S)
        if self.look()[0] is not Stage.HALFWAY:  # another job in the place of one that was not read would be lost
            self.end()
            self.start()

    def announce(self, more_bytes: int) -> None:
        """So many bytes more of the image are there. Never blocks."""
        os.eventfd_write(self._arrivals_fd, more_bytes)

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
            os.close(self._arrivals_fd)
            self._arrivals_fd = NONE


def _close_all_but(*fds: int) -> None:
    """In a fork: a rank's connections must end with the rank, not with its writer."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in fds:
            with suppress(OSError):
                os.close(int(name))
