"""The writer process: it moves bytes from staging memory to stable storage, and on rank 0 commits.

    rank --job--> its writer: write, hash, fsync own files --.written-RANK--> rank 0's writer: index, manifest, marker
         --so many bytes more are copied-->

Started once, before training, it serves one save after the other, and writes while its rank still copies. It imports
no torch, so it is small and there at once, and no lock of the trainer's is in its way. It survives its rank: when all
ranks have copied, the save becomes durable whoever of them dies. That is bounded: it ends `outlive_s` after its rank,
at once with its rank's parent (the agent's process tree), and idle as soon as its rank is gone.

Run as `python -m outlast.checkpoint.engine STAGING_FD ARRIVALS_FD OUTLIVE_S LINK_FD ...`, by stager.py.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from outlast.checkpoint.background import Link, Stage, ignore_signals, put_in_words
from outlast.checkpoint.blocks import Need, need_nothing, round_up, write_blocks
from outlast.checkpoint.commit import Reach, commit, pass_by, write_bytes, write_tracker
from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.job import Region, Report, Room, SaveJob, name_report
from outlast.checkpoint.large_pages import SharedMemory
from outlast.checkpoint.local_tier import LocalTier
from outlast.checkpoint.manifest import FileEntry
from outlast.checkpoint.ops import RealOps
from outlast.checkpoint.points import read_kill_point
from outlast.checkpoint.spreading import clear_place
from outlast.checkpoint.store import Store
from outlast.reliability.model import Node

LOOK_S: Final = 0.002
LOOK_MAX_S: Final = 0.25
LOOK_SHARE: Final = 0.02
"""Of the time that has been waited: looks are frequent where they matter, and few where many ranks are late."""
NICE: Final = 10
"""A tenth of a core's time beside a trainer that wants all of it: never so little that a save does not end."""


def serve(link: Link, staging_fd: int, arrivals_fd: int, *, reach: Reach, outlive_s: float) -> None:
    """Do one job after the other until the rank is gone."""
    link.watch(outlive_s)
    memory = _Memory(staging_fd)
    while (raw := link.wait_next()) is not None:
        try:
            job = msgspec.json.decode(raw, type=SaveJob | Room)
            image = memory.view(job.image_bytes)
            if isinstance(job, Room):
                link.report(Stage.HALFWAY)
            else:
                _save(link, image, job, reach, _Arrivals(link, arrivals_fd, job).need)
        except Exception as e:  # noqa: BLE001 -- whatever it is, the rank is told, and ends this process
            link.report(Stage.FAILED, put_in_words(e))


class _Memory:
    """The staging memory as this process sees it: mapped once, and anew when it has grown."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._memory: SharedMemory | None = None

    def view(self, size_bytes: int) -> memoryview:
        if self._memory is None or self._memory.size_bytes < round_up(size_bytes):
            self._memory = SharedMemory(self._fd, os.fstat(self._fd).st_size, writable=False)
            self._memory.fault_in()
        return self._memory.view


class _Arrivals:
    """How much of the image has been copied by the rank."""

    def __init__(self, link: Link, fd: int, job: SaveJob) -> None:
        self._link, self._fd = link, fd
        self._timeout_s, self._deadline_s = job.timeout_s, time.monotonic() + job.timeout_s
        self._there_bytes = 0

    def need(self, end_bytes: int) -> None:
        """Returns when the image is there up to end_bytes."""
        while self._there_bytes < end_bytes:
            if not self._link.wait_for(self._fd, max(0.0, self._deadline_s - time.monotonic())):
                raise CheckpointError(
                    f"the state was not copied within {self._timeout_s:.1f} s, or its rank has ended; not committed"
                )
            self._there_bytes += os.eventfd_read(self._fd)


def _save(link: Link, image: memoryview, job: SaveJob, reach: Reach, need: Need = need_nothing) -> None:
    ops, directory = RealOps(), Path(job.directory)
    deadline_s = time.monotonic() + job.timeout_s
    reach("write.begin")
    ops.make_dir(directory)  # there already; on network file systems this also makes it visible to this node
    itself = _identify(directory)
    place = clear_place(directory, job.spread, [region.name for region in job.shards])
    files = _write_shards(ops, place, image, job, reach, need)
    reach("write.done")
    if job.rank != 0:
        _leave_report(directory, job, files)
        link.report(Stage.HALFWAY)
        return
    link.report(Stage.HALFWAY)
    holders = dict.fromkeys(files, job.spread.node) if job.spread else {}
    files.update(_collect_reports(directory, job, deadline_s, holders))
    _commit(ops, directory, job, files, holders, image, itself, reach)
    durable_s = time.monotonic() - job.began_s
    # after the commit nothing may fail the save: what is left undone, the next save or the supervisor does
    assert job.manifest is not None, "rank 0 has it"
    if job.spread:  # no tracker, no prune: shelves tidy up, and other readers find nothing here
        link.report(Stage.DONE, str(durable_s).encode())
        return
    with suppress(OSError, CheckpointError):
        write_tracker(ops, Path(job.root), job.manifest.train_step)
        reach("commit.tracker")
    link.report(Stage.DONE, str(durable_s).encode())
    if job.keep_last:
        with suppress(OSError, CheckpointError):
            Store(job.root).prune(job.keep_last, keep=job.keep)


def _write_shards(
    ops: RealOps, directory: Path, image: memoryview, job: SaveJob, reach: Reach, need: Need
) -> dict[str, FileEntry]:
    """This rank's files, each durable, and their names. Returns only when all of the image was copied."""
    files = dict(job.written)
    for n, region in enumerate(job.shards):
        end_bytes = region.at_bytes + round_up(region.size_bytes)
        files[region.name] = write_blocks(
            ops,
            directory / region.name,
            image[region.at_bytes : end_bytes],
            region.size_bytes,
            reach if n == 0 else pass_by,  # drills stop at the points of the first one
            lambda size_bytes, begin=region.at_bytes: need(begin + size_bytes),  # type: ignore[misc]
        )
    need(job.image_bytes)
    ops.sync_dir(directory)
    return files


def _identify(directory: Path) -> tuple[int, int]:
    info = os.stat(directory)
    return info.st_dev, info.st_ino


def _leave_report(directory: Path, job: SaveJob, files: dict[str, FileEntry]) -> None:
    """Not synced: it is for now, and a power loss takes the save along in any case."""
    node = job.spread.node if job.spread else Node("")
    report = msgspec.json.encode(Report(save_id=job.save_id, files=files, node=node))
    path = directory / name_report(job.rank)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(report)
    os.rename(temporary, path)


def _collect_reports(
    directory: Path, job: SaveJob, deadline_s: float, holders: dict[str, Node]
) -> dict[str, FileEntry]:
    """All other ranks' files, as their writers wrote them, and on which node; the reports are gone then."""
    files: dict[str, FileEntry] = {}
    missing = set(range(1, job.world_size))
    began_s = time.monotonic()
    while missing:
        arrived = {rank for rank in missing if _take_report(directory / name_report(rank), job, files, holders)}
        missing -= arrived
        if not missing:
            break
        if time.monotonic() > deadline_s:
            raise CheckpointError(
                f"the writers of ranks {_shorten(missing)} did not finish within {job.timeout_s:.1f} s; not committed"
            )
        time.sleep(min(LOOK_MAX_S, LOOK_S + LOOK_SHARE * (time.monotonic() - began_s)))
    return files


def _take_report(path: Path, job: SaveJob, files: dict[str, FileEntry], holders: dict[str, Node]) -> bool:
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except FileNotFoundError:
        return False
    if report.save_id != job.save_id:
        return False
    files.update(report.files)
    if report.node:
        holders.update(dict.fromkeys(report.files, report.node))
    path.unlink()
    return True


def _shorten(ranks: set[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown


def _commit(
    ops: RealOps,
    directory: Path,
    job: SaveJob,
    files: dict[str, FileEntry],
    holders: dict[str, Node],
    image: memoryview,
    itself: tuple[int, int],
    reach: Reach,
) -> None:
    assert job.manifest is not None, "rank 0 has it"
    reach("commit.begin")
    with ThreadPoolExecutor(max(1, len(job.index))) as pool:  # small, and each waits for the disk

        def write(region: Region) -> FileEntry:
            content = bytes(image[region.at_bytes : region.at_bytes + region.size_bytes])
            return write_bytes(ops, directory / region.name, content)

        files.update(zip([region.name for region in job.index], pool.map(write, job.index), strict=True))
    reach("commit.index")
    if _identify(directory) != itself:
        raise CheckpointError(
            f"{directory}: another save of this train_step has taken its place; not committed", path=str(directory)
        )
    manifest = msgspec.structs.replace(job.manifest, files=files, made_at_s=time.time())
    if job.spread:
        LocalTier(Path(job.root), ops=ops).commit(manifest, holders, reach)
    else:
        commit(ops, directory, manifest, reach)


def _stand_back() -> None:
    """Training goes first wherever a core is short: hashing and writing wait for the disk most of the time anyway."""
    with suppress(OSError):
        os.nice(NICE)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main() -> int:
    ignore_signals()
    _stand_back()
    staging_fd, arrivals_fd, outlive_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    link = Link(*map(int, sys.argv[4:]))
    serve(link, staging_fd, arrivals_fd, reach=read_kill_point(), outlive_s=outlive_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
