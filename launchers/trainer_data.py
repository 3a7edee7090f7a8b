"""The corpus: the Python standard library's own sources as bytes, in Megatron-core's indexed data set.

    <stdlib>/*.py, by name, up to max_bytes --> data_dir/stdlib-3.11.7-2000000/corpus.{bin,idx}, digest
                                                  (built under a lock in a hidden folder, then one rename)

A token is a byte, a document is a file. A sample is a window of `seq` + 1 tokens; windows of one file share their
border token and none crosses into the next file. Which window has which number depends on the corpus and `seq` alone.

It is not Megatron's GPTDataset: that one shuffles with lists built for one number of samples and caches them on disk,
which would make the order depend on how long the run was meant to be (see trainer_order.py).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.indexed_dataset import (  # type: ignore[import-untyped]
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
)

from outlast.launchers.trainer_args import TrainerError

VOCABULARY: Final = 256
_LOCK_WAIT_S: Final = 120.0
_MACHINE_SPECIFIC: Final = "_sysconfigdata"
"""Holds this machine's build paths: not part of the text."""


class Corpus:
    """Samples by number. Opened read-only, memory-mapped."""

    def __init__(self, folder: Path, seq: int) -> None:
        self.identity = (folder / "digest").read_text(encoding="ascii").strip()
        """Hash of the tokens. A checkpoint keeps it: the same sample numbers mean nothing over another text."""
        if _digest(folder) != self.identity:
            raise TrainerError(f"{folder}: the corpus does not match its digest. Remove the folder; it is built again")
        self._data = IndexedDataset(str(folder / "corpus"), mmap=True)
        self._seq = seq
        windows = np.maximum((self._data.sequence_lengths.astype(np.int64) - 1) // seq, 0)
        self._ends = np.cumsum(windows)
        """Sample numbers at which each document's windows end."""
        self.samples = int(self._ends[-1])
        if self.samples < 1:
            raise TrainerError(f"{folder}: no document is longer than seq {seq}")

    def tokens(self, sample: int) -> npt.NDArray[np.int64]:
        """[seq + 1] tokens: inputs are all but the last, labels all but the first."""
        document = int(np.searchsorted(self._ends, sample, side="right"))
        before = int(self._ends[document - 1]) if document else 0
        window = self._data.get(document, offset=(sample - before) * self._seq, length=self._seq + 1)
        return np.asarray(window, dtype=np.int64)


def open_corpus(data_dir: Path, *, seq: int, max_bytes: int, source: Path | None = None) -> Corpus:
    """The corpus in data_dir, built first where it is not there. Any number of processes may call this at once."""
    folder = data_dir / f"stdlib-{platform.python_version()}-{max_bytes}"
    if not folder.is_dir():
        data_dir.mkdir(parents=True, exist_ok=True)
        with _lock(data_dir / ".build.lock"):
            # The lock only saves double work; where it does not hold (some network file systems), the rename decides.
            if not folder.is_dir():
                _build(folder, source or Path(sysconfig.get_path("stdlib")), max_bytes)
    return Corpus(folder, seq)


def source_files(source: Path, max_bytes: int) -> tuple[Path, ...]:
    """Modules directly in `source`, by name, until their sizes reach max_bytes."""
    chosen, total = [], 0
    for path in sorted(source.glob("*.py")):
        if path.is_file() and not path.name.startswith(_MACHINE_SPECIFIC) and total < max_bytes:
            chosen.append(path)
            total += path.stat().st_size
    return tuple(chosen)


def _build(folder: Path, source: Path, max_bytes: int) -> None:
    files = source_files(source, max_bytes)
    if not files:
        raise TrainerError(f"{source}: no *.py there; this Python has no sources of its standard library to train on")
    scratch = folder.with_name(f".{folder.name}.{platform.node()}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    builder = IndexedDatasetBuilder(str(scratch / "corpus.bin"), dtype=DType.dtype_from_code(DType.uint8.value))
    for path in files:
        text = path.read_bytes()
        if text:
            builder.add_document(np.frombuffer(text, dtype=np.uint8), [len(text)])
    builder.finalize(str(scratch / "corpus.idx"))
    (scratch / "digest").write_text(_digest(scratch) + "\n", encoding="ascii")
    for name in ("corpus.bin", "corpus.idx", "digest"):
        with open(scratch / name, "rb") as file:
            os.fsync(file.fileno())
    try:
        scratch.rename(folder)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        if not folder.is_dir():
            raise


def _digest(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in ("corpus.bin", "corpus.idx"):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path, "w", encoding="ascii") as file:
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise TrainerError(f"{path}: another process has been building for {_LOCK_WAIT_S:.0f} s") from error
                time.sleep(0.05)
        yield
