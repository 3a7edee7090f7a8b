"""The copy of an image into staging memory: at once, or in a thread beside the forward and backward passes.

    |piece|piece|piece|...|piece|     ascending
        announce  announce  announce  so many bytes more are there: the writer process follows
                                   ^  passed: told when all is there and before the last announcement

A save whose last bytes were never announced is never committed, whoever dies. A copy that the train loop waits for
announces once, at its end: a writer that followed it would hold the loop by what it takes of the cores. It may run
ahead of the ranks' agreement, since a copy that nobody was told of can be made again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, NamedTuple

import torch

from outlast.checkpoint.image import Image

CHUNK_BYTES: Final = 16 << 20
"""A larger tensor is copied in parts, and as much is announced at once."""
THREADS: Final = 2
"""Of a copy that the train loop waits for."""


class _Part(NamedTuple):
    """What is copied in one go, and to where."""

    at_bytes: int
    end_bytes: int
    data: torch.Tensor | bytes | memoryview


class Copier:
    """Copies into staging memory."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._registered = False
        self._lock = threading.Lock()

    def copy(self, image: Image) -> Iterator[int]:
        """Goes on as it is iterated over; yields up to where it is."""
        for part in _list_parts(image):
            self._put(part)
            yield part.end_bytes

    def copy_all(self, image: Image) -> None:
        """At once, in several threads: they are finer than ranks for a kernel that has more ranks than cores."""
        parts = _list_parts(image)
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    part = next(parts, None)
                if part is None:
                    return
                self._put(part)

        with ThreadPoolExecutor(THREADS - 1, thread_name_prefix="stage") as pool:
            helpers = [pool.submit(work) for _ in range(THREADS - 1)]
            work()
            for helper in helpers:
                helper.result()

    def _put(self, part: _Part) -> None:
        data = part.data
        if not isinstance(data, torch.Tensor):
            self.memory[part.at_bytes : part.end_bytes] = data
            return
        if data.is_cuda:
            self._register()
        self._bytes[part.at_bytes : part.end_bytes].view(data.dtype).view(data.shape).copy_(data)

    def _register(self) -> None:
        """Pin the memory, so that a GPU writes into it at full speed. Never tried but on the first CUDA tensor."""
        with self._lock:
            if not self._registered:
                at, size_bytes = self._bytes.data_ptr(), self._bytes.numel()
                torch.cuda.cudart().cudaHostRegister(at, size_bytes, 0)  # type: ignore[no-untyped-call]
                self._registered = True


def _list_parts(image: Image) -> Iterator[_Part]:
    for pieces in image.pieces:
        for piece in pieces:
            at = piece.at_bytes
            if not isinstance(piece.data, torch.Tensor):
                yield _Part(at, at + len(piece.data), piece.data)
                continue
            for part in _cut(piece.data):
                end = at + part.numel() * part.element_size()
                yield _Part(at, end, part)
                at = end


def _cut(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if not tensor.numel():
        return
    if tensor.numel() * tensor.element_size() <= CHUNK_BYTES or not tensor.is_contiguous():
        yield tensor
        return
    yield from torch.split(tensor.view(-1), CHUNK_BYTES // tensor.element_size())


class Copying:
    """One copy of one image."""

    def __init__(
        self, copier: Copier, image: Image, announce: Callable[[int], None], passed: Callable[[str], None]
    ) -> None:
        self.image = image
        self._copier, self._announce, self._passed = copier, announce, passed
        self._told = 0
        self._is_whole = False
        self._thread: threading.Thread | None = None
        self._stop = False
        self.error = ""
        """Why it will never be whole."""

    def start(self) -> None:
        """In a thread."""
        self._thread = threading.Thread(target=self.run, name="stage", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """To its end, told to the writer; never raises."""
        try:
            if not self._is_whole:
                self._copy()
            self._announce(self.image.size_bytes - self._told)
            self._passed("save.handed_over")
        except Exception as e:  # noqa: BLE001 -- told where it is waited for
            self.error = self.error or f"{type(e).__name__}: {e}"

    def run_ahead(self) -> None:
        """As far as nobody need be told of it; never raises. run() does the rest, and what went wrong again."""
        with suppress(Exception):
            self._copy()

    def _copy(self) -> None:
        if self._thread is None:
            self._copier.copy_all(self.image)
        else:
            self._copy_along()
        self._is_whole = True
        self._passed("save.copied")

    def _copy_along(self) -> None:
        for done in self._copier.copy(self.image):
            if self._stop:
                self.error = "was given up"
                raise InterruptedError(self.error)
            if done - self._told >= CHUNK_BYTES:
                self._announce(done - self._told)
                self._told = done

    def wait(self) -> None:
        """Until the live state is not needed any more."""
        if self._thread is not None:
            self._thread.join()

    def drop(self) -> None:
        """Leave off: nobody needs it."""
        self._stop = True
        self.wait()
