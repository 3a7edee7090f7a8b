"""Who reads which bytes of which file for a restore, over all ranks and nodes. Pure.

    needs of every rank (node, file -> blocks) -> each rank: the blocks it reads, whether it hashes them, who takes them

Files are read in blocks. On each node a block is read once, by one rank, however many ranks take something out of it.
A file's hash is one number over all of it, so one node reads a file whole and hashes it as it goes: the node that needs
most of it. A node that needs half of it or more hashes it too; one that needs less reads its blocks alone. Within a
node whole files are dealt out by size, since a hash goes through a file in order. A file that nobody needs is not read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

BLOCK_BYTES: Final = 8 << 20
WHOLE_FROM: Final = 0.5
"""A node that needs this much of a file reads all of it, and knows its hash itself."""

Runs = tuple[tuple[int, int], ...]
"""Half-open ranges of a file's blocks, ascending, none empty, none touching."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What one rank takes out of each file."""

    node: str
    """Ranks with the same can share memory."""
    files: Mapping[str, Runs]


@dataclass(frozen=True, kw_only=True)
class FileRead:
    """One file that a rank reads for its node."""

    name: str
    size_bytes: int
    runs: Runs
    hashed: bool
    """All of it is read, and its hash is compared."""
    takers: Mapping[int, Runs]
    """Rank -> what it takes; nobody else need wait."""


@dataclass(frozen=True, kw_only=True)
class Reads:
    """One rank's work, in this order."""

    files: tuple[FileRead, ...]
    readers: int
    """Ranks of this node that read anything."""


def to_runs(ranges: Iterable[tuple[int, int]], block_bytes: int = BLOCK_BYTES) -> Runs:
    """The blocks that hold these half-open ranges of bytes."""
    return _merge((begin // block_bytes, (end - 1) // block_bytes + 1) for begin, end in ranges if begin < end)


def _merge(runs: Iterable[tuple[int, int]]) -> Runs:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(runs):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)


def count(runs: Runs) -> int:
    return sum(end - begin for begin, end in runs)


def holds(runs: Runs, block: int) -> bool:
    return any(begin <= block < end for begin, end in runs)


def all_blocks(size_bytes: int, block_bytes: int = BLOCK_BYTES) -> Runs:
    return to_runs([(0, size_bytes)], block_bytes)


def plan_reads(
    needs: Sequence[Needs], sizes: Mapping[str, int], *, hashes: bool, block_bytes: int = BLOCK_BYTES
) -> tuple[Reads, ...]:
    """Each rank's work. `sizes` has every file that is needed. hashes=False: needed blocks alone, none compared."""
    takers: dict[str, dict[str, dict[int, Runs]]] = defaultdict(lambda: defaultdict(dict))  # node, file, rank
    for rank, need in enumerate(needs):
        for name, runs in need.files.items():
            if runs:
                takers[need.node][name][rank] = runs
    hashers = _choose_hashers(takers, sizes) if hashes else {}
    work: dict[int, list[FileRead]] = defaultdict(list)
    readers: dict[str, int] = {}
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, need in enumerate(needs):
        ranks_of[need.node].append(rank)
    for node, files in takers.items():
        reads = []
        for name, by_rank in files.items():
            every = all_blocks(sizes[name], block_bytes)
            needed = _merge(run for runs in by_rank.values() for run in runs)
            whole = hashes and (hashers[name] == node or count(needed) >= WHOLE_FROM * count(every))
            runs = every if whole else needed
            reads.append(FileRead(name=name, size_bytes=sizes[name], runs=runs, hashed=whole, takers=by_rank))
        dealt = _deal(reads, ranks_of[node])
        readers[node] = len(dealt)
        work.update(dealt)
    return tuple(
        Reads(files=tuple(work.get(rank, ())), readers=readers.get(need.node, 0)) for rank, need in enumerate(needs)
    )


def _choose_hashers(takers: Mapping[str, Mapping[str, Mapping[int, Runs]]], sizes: Mapping[str, int]) -> dict[str, str]:
    """File -> the node that needs most of it; of those that need as much, the one with least to read so far."""
    needed: dict[str, dict[str, int]] = defaultdict(dict)
    for node, files in takers.items():
        for name, by_rank in files.items():
            needed[name][node] = count(_merge(run for runs in by_rank.values() for run in runs))
    chosen, load = {}, dict.fromkeys(takers, 0)
    for name in sorted(needed, key=lambda name: (-sizes[name], name)):
        node = min(needed[name], key=lambda node: (-needed[name][node], load[node], node))
        chosen[name] = node
        load[node] += sizes[name]
    return chosen


def _deal(reads: Sequence[FileRead], ranks: Sequence[int]) -> dict[int, list[FileRead]]:
    """The largest first, each to the rank with least to read; where equal, to who takes most of it."""
    load = dict.fromkeys(ranks, 0)
    dealt: dict[int, list[FileRead]] = defaultdict(list)
    for read in sorted(reads, key=lambda read: (-count(read.runs), read.name)):
        rank = min(ranks, key=lambda rank: (load[rank], -count(read.takers.get(rank, ())), rank))
        dealt[rank].append(read)
        load[rank] += count(read.runs)
    return dealt
