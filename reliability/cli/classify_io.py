"""The parts of `outlast classify` put together: bytes in, JSON lines out. No click: for the command and for tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from outlast.monitors.lines import BLOCK_CHARS, LineReader
from outlast.monitors.sieve import CHUNK_BYTES, marked, whole_lines
from outlast.reliability.catalogue import load_catalogue
from outlast.reliability.classify import classify_block, classify_stream


def run_classify(
    source: BinaryIO, sink: BinaryIO, *, block: bool = False, every: bool = True, site: Path | None = None
) -> None:
    """One JSON row a line of `source`, or one for all of it (`block`). `every` False: only lines that a rule knows."""
    catalogue = load_catalogue(site)
    if block:
        text = source.read(4 * BLOCK_CHARS).decode("utf-8", "replace")
        sink.write(msgspec.json.encode(classify_block(text, LineReader(), catalogue)) + b"\n")
    else:
        for rows in classify_stream(whole_lines(_chunks(source)), LineReader(), catalogue, marked=marked, every=every):
            sink.write(rows)
            sink.flush()  # a pipe's reader should see a row as soon as its line was there
    sink.flush()


def _chunks(source: BinaryIO) -> Iterator[bytes]:
    """What is there now, at most a chunk: a pipe that trickles is answered line by line."""
    read = getattr(source, "read1", source.read)
    while chunk := read(CHUNK_BYTES):
        yield chunk
