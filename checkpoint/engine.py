"""The writer process: it moves bytes from staging memory to stable storage, and on rank 0 commits.

    rank --job--> its writer: write, hash, fsync own files --.written-RANK--> rank 0's writer: index, manifest, marker

Started once, before training, it serves one save after the other. It imports no torch, so it is small and there at
once, and no lock of the trainer's is in its way. It survives its rank: when all ranks have copied, the save becomes
durable whoever of them dies. That is bounded: it ends `outlive_s` after its rank, at once with its rank's parent
(the agent's process tree), and idle as soon as its rank is gone.

Run as `python -m outlast.checkpoint.engine STAGING_FD OUTLIVE_S LINK_FD ...`, by writer.py.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from outlast.checkpoint.background import Link, Stage, ignore_signals, put_in_words
from outlast.checkpoint.blocks import round_up, write_blocks
from outlast.checkpoint.commit import Reach, commit, pass_by, write_bytes, write_tracker
from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.job import Region, Report, SaveJob, name_report
from outlast.checkpoint.manifest import FileEntry
from outlast.checkpoint.ops import RealOps
from outlast.checkpoint.points import read_kill_point
from outlast.checkpoint.store import Store

LOOK_S: Final = 0.004
LOOK_MAX_S: Final = 0.25


def serve(link: Link, staging_fd: int, *, reach: Reach, outlive_s: float) -> None:
    """Do one job after the other until the rank is gone."""
    link.watch(outlive_s)
    while (raw := link.wait_next()) is not None:
        try:
            _save(link, staging_fd, msgspec.json.decode(raw, type=SaveJob), reach)
        except Exception as e:  # noqa: BLE001 -- whatever it is, the rank is told, and ends this process
            link.report(Stage.FAILED, put_in_words(e))


def _save(link: Link, staging_fd: int, job: SaveJob, reach: Reach) -> None:
    ops, directory = RealOps(), Path(job.directory)
    deadline_s = time.monotonic() + job.timeout_s
    mapped = mmap.mmap(staging_fd, round_up(max(job.image_bytes, 1)), prot=mmap.PROT_READ)
    with mapped, memoryview(mapped) as image:
        reach("write.begin")
        ops.make_dir(directory)  # there already; on network file systems this also makes it visible to this node
        itself = _identify(directory)
        files = dict(job.written)
        for n, region in enumerate(job.shards):
            with _cut(image, region) as part:
                # drills stop at the points of the first one
                files[region.name] = write_blocks(
                    ops, directory / region.name, part, region.size_bytes, reach if n == 0 else pass_by
                )
        ops.sync_dir(directory)
        reach("write.done")
        if job.rank != 0:
            _leave_report(directory, job, files)
            link.report(Stage.HALFWAY)
            return
        link.report(Stage.HALFWAY)
        files.update(_collect_reports(directory, job, deadline_s))
        _commit(ops, directory, job, files, image, itself, reach)
    durable_s = time.monotonic() - job.began_s
    # after the commit nothing may fail the save: what is left undone, the next save or the supervisor does
    assert job.manifest is not None, "rank 0 has it"
    with suppress(OSError, CheckpointError):
        write_tracker(ops, Path(job.root), job.manifest.train_step)
        reach("commit.tracker")
    link.report(Stage.DONE, str(durable_s).encode())
    if job.keep_last:
        with suppress(OSError, CheckpointError):
            Store(job.root).prune(job.keep_last, keep=job.keep)


def _cut(image: memoryview, region: Region) -> memoryview:
    return image[region.at_bytes : region.at_bytes + round_up(region.size_bytes)]


def _identify(directory: Path) -> tuple[int, int]:
    info = os.stat(directory)
    return info.st_dev, info.st_ino


def _leave_report(directory: Path, job: SaveJob, files: dict[str, FileEntry]) -> None:
    """Not synced: it is for now, and a power loss takes the save along in any case."""
    report = msgspec.json.encode(Report(save_id=job.save_id, files=files))
    path = directory / name_report(job.rank)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(report)
    os.rename(temporary, path)


def _collect_reports(directory: Path, job: SaveJob, deadline_s: float) -> dict[str, FileEntry]:
    """All other ranks' files, as their writers wrote them; the reports are gone then."""
    files: dict[str, FileEntry] = {}
    missing = set(range(1, job.world_size))
    pause_s = LOOK_S
    while missing:
        arrived = {rank for rank in missing if _take_report(directory / name_report(rank), job, files)}
        missing -= arrived
        if not missing:
            break
        if time.monotonic() > deadline_s:
            raise CheckpointError(
                f"the writers of ranks {_shorten(missing)} did not finish within {job.timeout_s:.1f} s; not committed"
            )
        pause_s = LOOK_S if arrived else min(LOOK_MAX_S, pause_s * 1.1)
        time.sleep(pause_s)
    return files


def _take_report(path: Path, job: SaveJob, files: dict[str, FileEntry]) -> bool:
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except FileNotFoundError:
        return False
    if report.save_id != job.save_id:
        return False
    files.update(report.files)
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
    image: memoryview,
    itself: tuple[int, int],
    reach: Reach,
) -> None:
    assert job.manifest is not None, "rank 0 has it"
    reach("commit.begin")
    for region in job.index:
        content = bytes(image[region.at_bytes : region.at_bytes + region.size_bytes])
        files[region.name] = write_bytes(ops, directory / region.name, content)
    reach("commit.index")
    if _identify(directory) != itself:
        raise CheckpointError(
            f"{directory}: another save of this train_step has taken its place; not committed", path=str(directory)
        )
    manifest = msgspec.structs.replace(job.manifest, files=files, made_at_s=time.time())
    commit(ops, directory, manifest, reach)


def main() -> int:
    ignore_signals()
    staging_fd, outlive_s = int(sys.argv[1]), float(sys.argv[2])
    serve(Link(*map(int, sys.argv[3:])), staging_fd, reach=read_kill_point(), outlive_s=outlive_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
