"""Look at one checkpoint's directory and say whether it is whole. Reads, never writes, never unpickles.

Cheap questions first: is there a commit marker, does it fit the manifest, does every file have its size; then the
hashes, each file once, remembered by (path, size, mtime, inode) so that asking again costs a stat.

No link is followed below the checkpoint's directory: a manifest or a directory that was tampered with can make a
checkpoint fail, not make us read or hash something else.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import xxhash

from outlast.checkpoint.errors import ManifestError, NotCommitted, NotWhole
from outlast.checkpoint.manifest import MANIFEST, MARKER, FileEntry, Found, Manifest, check, open_marked

CHUNK_BYTES: Final = 4 << 20
MARKER_MAX_BYTES: Final = 4096
MANIFEST_MAX_BYTES: Final = 256 << 20
GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR})

HashKey = tuple[str, int, int, int]


@dataclass(frozen=True)
class HashCache:
    """Hashes of files as they were last read. A file changed in place gets a new mtime, a replaced one a new inode.

    What it cannot see is a disk that rots under an unchanged inode; a restore therefore reads afresh (reader.load).
    """

    known: dict[HashKey, str] = field(default_factory=dict)

    def hash_file(self, fd: int, path: str) -> str:
        info = os.fstat(fd)
        key = (path, info.st_size, info.st_mtime_ns, info.st_ino)
        if (known := self.known.get(key)) is not None:
            return known
        found = hash_open_file(fd)
        self.known[key] = found
        return found


def hash_open_file(fd: int) -> str:
    digest = xxhash.xxh3_128()
    buffer = bytearray(max(1, min(CHUNK_BYTES, os.fstat(fd).st_size)))
    view = memoryview(buffer)
    while n := os.readv(fd, [buffer]):
        digest.update(view[:n])
    return digest.hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a committed checkpoint; its files are not looked at. Raises NotWhole."""
    name = directory.name
    try:
        if stat.S_ISLNK(os.lstat(directory).st_mode):
            raise NotWhole(name, ("is a symbolic link (refused)",))
        marker = _read_small(directory, MARKER, MARKER_MAX_BYTES)
        if marker is None:
            raise NotCommitted(name, (f"no {MARKER}: a save that did not finish, or not one of ours",))
        raw = _read_small(directory, MANIFEST, MANIFEST_MAX_BYTES)
        if raw is None:
            raise NotWhole(name, (f"{MANIFEST}: missing, though {MARKER} is there",))
        return open_marked(marker, raw)
    except ManifestError as e:
        raise NotWhole(name, (str(e),)) from e
    except FileNotFoundError as e:
        raise NotWhole(name, ("is not there (any more)",)) from e
    except OSError as e:
        raise Unreadable(name, (f"{e.filename or name}: cannot be read ({e.strerror})",)) from e


class Unreadable(NotWhole):
    """It may be whole: it could not be read. An older one is taken if there is one, but this is no proof of a fault."""


def _read_small(directory: Path, name: str, limit_bytes: int) -> bytes | None:
    """The content of a regular file; None where there is none of that name."""
    try:
        fd = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        if e.errno in GONE:
            return None
        if e.errno == errno.ELOOP:
            raise ManifestError(f"{name}: is a symbolic link (refused)") from e
        raise
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ManifestError(f"{name}: not a regular file")
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise ManifestError(f"{name}: longer than {limit_bytes:,} bytes; refused")
    return data


def verify(directory: Path, *, hashes: bool = True, cache: HashCache | None = None) -> Manifest:
    """The manifest of a checkpoint that is whole. Raises NotWhole (Unreadable where it could not be told)."""
    manifest = read_manifest(directory)
    require(directory, manifest.files, find_files(directory, manifest.files))
    if hashes:
        seen = cache if cache is not None else HashCache()
        require(directory, manifest.files, find_files(directory, manifest.files, hash_fd=seen.hash_file))
    return manifest


def require(directory: Path, files: Mapping[str, FileEntry], found: Mapping[str, Found]) -> None:
    """Raise where a file is not as the manifest says."""
    if problems := check(files, found):
        unreadable = sum(f.unreadable for f in found.values()) == len(problems)
        raise (Unreadable if unreadable else NotWhole)(directory.name, problems)


def find_files(
    directory: Path, paths: Iterable[str], *, hash_fd: Callable[[int, str], str] | None = None
) -> dict[str, Found]:
    """These files as they lie there; those that are missing are left out. Hashed where `hash_fd` is given.

    Every path has passed manifest.unsafe_path.
    """
    found = {}
    for path in paths:
        if (one := _find_file(directory, path, hash_fd)) is not None:
            found[path] = one
    return found


def _find_file(directory: Path, path: str, hash_fd: Callable[[int, str], str] | None) -> Found | None:
    try:
        fd = open_below(directory, path)
    except OSError as e:
        if e.errno in GONE:
            return None
        if e.errno == errno.ELOOP:
            return Found(size_bytes=-1, refused="is a symbolic link (refused)")
        return Found(size_bytes=-1, refused=f"cannot be read ({e.strerror})", unreadable=True)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return Found(size_bytes=-1, refused="not a regular file (refused)")
        digest = hash_fd(fd, str(directory / path)) if hash_fd else None
        return Found(size_bytes=info.st_size, xxh3_128=digest)
    except OSError as e:
        return Found(size_bytes=-1, refused=f"cannot be read ({e.strerror})", unreadable=True)
    finally:
        os.close(fd)


def read_content(directory: Path, path: str, limit_bytes: int) -> bytes:
    """All of a small file, limit_bytes at most. Raises NotWhole (Unreadable)."""
    try:
        fd = open_below(directory, path)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise NotWhole(directory.name, (f"{path}: not a regular file (refused)",))
            return file.read(limit_bytes)
    except OSError as e:
        if e.errno in GONE:
            raise NotWhole(directory.name, (f"{path}: missing",)) from e
        raise Unreadable(directory.name, (f"{path}: cannot be read ({e.strerror})",)) from e


def list_plain(directory: Path) -> dict[str, FileEntry]:
    """The regular files of a checkpoint that has no manifest, with their sizes; their hashes are not known."""
    try:
        entries = [entry for entry in os.scandir(directory) if entry.is_file(follow_symlinks=False)]
        sizes = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}
    except OSError as e:
        raise Unreadable(directory.name, (f"{e.filename or directory}: cannot be read ({e.strerror})",)) from e
    return {name: FileEntry(size_bytes=size, xxh3_128="0" * 32) for name, size in sizes.items()}


def open_below(directory: Path, path: str) -> int:
    """Open a file below the directory, following no link on the way (the directory's own name may be one)."""
    *parents, name = path.split("/")
    at = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parents:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
        # O_NONBLOCK: opening a FIFO that somebody put there must not wait for a writer
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)
