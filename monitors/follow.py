"""Lines of a growing file, from its end on: survives rotation, truncation, and a file that appears later.

An edge: it reads files and nothing else. It polls, since a log may lie on a network file system, where the kernel
tells nobody of another node's writes. Memory is bounded: a line longer than the limit is cut, never gathered.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

CHUNK_BYTES: Final = 1 << 18
LINE_BYTES: Final = 1 << 14
"""Bytes kept of one line; the rest of a longer line is passed over."""


class FollowedFile:
    """`poll` gives the complete lines since the last call. Not thread-safe; close it when done."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._at = 0
        self._partial = b""
        self._cutting = False
        self._seen_missing = False
        self.truncated = 0
        """How often the file became shorter under us: lines may be lost."""
        self.why = ""
        """Why there is nothing to read just now; '' while the file is open."""

    def poll(self) -> list[bytes]:
        """Complete lines, at most about one chunk of them: call again until it gives none."""
        if self._fd < 0 and not self._open():
            return []
        try:
            status = os.fstat(self._fd)
            if status.st_size < self._at:
                self.truncated += 1
                self._at, self._partial, self._cutting = 0, b"", False
            chunk = os.pread(self._fd, CHUNK_BYTES, self._at) if status.st_size > self._at else b""
            if chunk:
                self._at += len(chunk)
                return self._split(chunk)
            return self._rotate(status)
        except OSError as e:  # a network file system that went away, a stale handle
            self.why = f"{self._path}: {e.strerror}"
            self.close()
            return []

    def _open(self) -> bool:
        """At first from the end, what is older being history; a file that appears later from its start."""
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as e:
            self.why = f"{self._path}: {e.strerror}"
            self._seen_missing = True
            return False
        self._at = 0 if self._seen_missing else os.fstat(self._fd).st_size
        self._seen_missing, self.why = True, ""
        return True

    def _rotate(self, status: os.stat_result) -> list[bytes]:
        """Nothing more here: if the name now belongs to another file, finish this one and go over to it."""
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return []  # between the two steps of a rotation; the old file may still grow
        if (there.st_ino, there.st_dev) == (status.st_ino, status.st_dev):
            return []
        last = [self._partial] if self._partial and not self._cutting else []
        self.close()
        self._open()
        return last

    def _split(self, chunk: bytes) -> list[bytes]:
        lines = (self._partial + chunk).split(b"\n")
        self._partial = lines.pop()
        if self._cutting and lines:
            lines.pop(0)  # the tail of a line that was cut
            self._cutting = False
        if len(self._partial) > LINE_BYTES:
            if not self._cutting:
                lines.append(self._partial[:LINE_BYTES])
            self._cutting, self._partial = True, b""
        return lines

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._at, self._partial, self._cutting = -1, 0, b"", False
