"""Memory files mapped in large pages: the same bytes for everybody who maps them, whatever the kernel makes of it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.checkpoint import large_pages
from outlast.checkpoint.large_pages import LARGE_BYTES, SharedMemory


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


@settings(max_examples=25, deadline=None)
@given(size_bytes=st.integers(1, 3 * LARGE_BYTES + 5000), large=st.integers(0, 3), more_bytes=st.integers(0, 5000))
def test_what_one_writes_the_other_reads_wherever_it_was_faulted_in(
    size_bytes: int, large: int, more_bytes: int
) -> None:
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, size_bytes)
        ours, theirs = (SharedMemory(fd, size_bytes, writable=writable) for writable in (True, False))
        ours.view[-1] = 7  # what is there before stays
        begin = min(large * LARGE_BYTES, size_bytes - 1)
        ours.fault_in(begin - begin % LARGE_BYTES, min(size_bytes, begin + LARGE_BYTES + more_bytes))
        ours.fault_in()
        theirs.fault_in()
        assert len(ours.view) == len(theirs.view) == size_bytes and theirs.view[-1] == 7
        ours.view[size_bytes // 2] = 9
        assert theirs.view[size_bytes // 2] == os.pread(fd, 1, size_bytes // 2)[0] == 9
        assert sum(theirs.view[:4096]) == sum(os.pread(fd, 4096, 0))
    finally:
        os.close(fd)


def test_who_may_not_write_cannot(file: int) -> None:
    os.ftruncate(file, 4096)
    view = SharedMemory(file, 4096, writable=False).view
    with pytest.raises(TypeError):
        view[0] = 1


def test_the_mapping_lasts_as_long_as_a_view_of_it_and_no_longer(file: int) -> None:
    def mapped() -> bool:
        with open("/proc/self/maps") as maps:
            return any("memfd:test" in line for line in maps)

    os.ftruncate(file, LARGE_BYTES)
    view = SharedMemory(file, LARGE_BYTES, writable=True).view[10:20]
    gc.collect()
    view[0] = 5
    assert os.pread(file, 1, 10) == b"\5" and mapped()
    del view
    gc.collect()
    assert not mapped()


def gives_large_pages() -> bool:
    """Linux 6.1 and later do on request, where shmem is not forbidden to."""
    version = tuple(int(part) for part in os.uname().release.split(".")[:2])
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return version >= (6, 1) and setting.exists() and "[deny]" not in setting.read_text()


def count_large_bytes(name: str) -> int:
    """Of all mappings here of the memory file of that name."""
    found, mine = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            mine = f"/memfd:{name} " in line
        elif mine and line.startswith("ShmemPmdMapped:"):
            found += int(line.split()[1]) << 10
    return found


def test_pages_are_large_where_the_kernel_gives_them() -> None:
    fd = os.memfd_create("test-large")
    os.ftruncate(fd, 4 * LARGE_BYTES)
    ours, theirs = (SharedMemory(fd, 4 * LARGE_BYTES, writable=writable) for writable in (True, False))
    ours.fault_in()
    theirs.fault_in()
    assert ours.view[0] == theirs.view[-1] == 0
    assert count_large_bytes("test-large") == (2 * 4 * LARGE_BYTES if gives_large_pages() else 0)
    os.close(fd)


def test_a_kernel_without_large_pages_gives_ordinary_ones(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "COLLAPSE", 999)  # EINVAL, as before Linux 6.1
    monkeypatch.setattr(large_pages, "POPULATE_WRITE", 999)
    os.ftruncate(file, 2 * LARGE_BYTES)
    memory = SharedMemory(file, 2 * LARGE_BYTES, writable=True)
    memory.fault_in()
    memory.view[-1] = 3
    assert os.pread(file, 1, 2 * LARGE_BYTES - 1) == b"\3"


def test_what_cannot_be_mapped_is_an_error() -> None:
    with pytest.raises(OSError, match="mapping 4,096 bytes"):
        SharedMemory(-1, 4096, writable=True)
