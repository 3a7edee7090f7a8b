"""Write one large file from memory: aligned blocks past the page cache, several in flight, hashed beside.

    image   |block|block|block|..|   main thread: wait until it is there, give it to the threads, hash it
                |     |     |        threads: pwrite each, in any order
    file    |block|block|block|..|   then cut to its size, fsync

The image may still be being filled: a block is written as soon as it is there. The page cache would copy every byte
once more and give it to the disk when it likes. The hash is of the memory, before any disk had it. Nothing here decides
an order between files: see commit.py.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import xxhash

from outlast.checkpoint.commit import Reach
from outlast.checkpoint.manifest import FileEntry
from outlast.checkpoint.ops import PAGE_BYTES, BlockSink, Ops

BLOCK_BYTES: Final = 16 << 20
IN_FLIGHT: Final = 8
"""Threads, which wait for the disk: it stays busy while the train loop has all cores."""
HASH_BYTES: Final = 1 << 20
Need = Callable[[int], None]
"""need(end_bytes) returns when the image is there up to end_bytes."""


def round_up(size_bytes: int, unit_bytes: int = PAGE_BYTES) -> int:
    return -(-size_bytes // unit_bytes) * unit_bytes


def need_nothing(_end_bytes: int) -> None:
    """The `need` of an image that is there."""


def write_blocks(
    ops: Ops,
    path: Path,
    image: memoryview,
    size_bytes: int,
    reach: Reach,
    need: Need = need_nothing,
) -> FileEntry:
    """A new file with the first size_bytes of `image`, on stable storage but for its name (see sync_dir).

    `image` begins at a page and is whole pages long: what is behind size_bytes may be written, and is cut off again.
    """
    sink = ops.create_blocks(path, size_bytes)
    try:
        reach("write.created")
        digest = _write_all(sink, image[: round_up(size_bytes)], size_bytes, reach, need)
        reach("write.unsynced")
        sink.sync()
    finally:
        sink.close()
    reach("write.synced")
    return FileEntry(size_bytes=size_bytes, xxh3_128=digest)


def _write_all(sink: BlockSink, image: memoryview, size_bytes: int, reach: Reach, need: Need) -> str:
    digest = xxhash.xxh3_128()
    starts = range(0, image.nbytes, BLOCK_BYTES)
    pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="write")
    pending: list[Future[None]] = []
    try:
        for n, start in enumerate(starts):
            end = min(start + BLOCK_BYTES, size_bytes)
            need(end)
            if n == len(starts) // 2:
                reach("write.half")
            pending.append(pool.submit(sink.write_at, image[start : start + BLOCK_BYTES], start))
            for at in range(start, end, HASH_BYTES):
                digest.update(image[at : min(at + HASH_BYTES, size_bytes)])
        for one in pending:
            one.result()
    finally:
        pool.shutdown(cancel_futures=True)
    return digest.hexdigest()
