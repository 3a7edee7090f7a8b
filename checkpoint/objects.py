"""An object store as a few operations, through fsspec: put, read, size, list, remove.

fsspec and the store's own library (s3fs for s3://) are imported when the first operation is made, in a process that
asks for it; no head-node path loads them. Keys and endpoint are those libraries' affair: they come from the
environment or from the files that it names, never from here. Each call ends by itself: connections and reads have
time limits, tries are counted. Nothing here knows what a checkpoint is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from outlast.checkpoint.errors import StoreError

CHUNK_BYTES: Final = 8 << 20
CONNECT_S: Final = 5
READ_S: Final = 60
TRIES: Final = 3
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    # listings are never cached: another process may have written since
    "s3": {
        "use_listings_cache": False,
        "config_kwargs": {"connect_timeout": CONNECT_S, "read_timeout": READ_S, "retries": {"max_attempts": TRIES}},
    },
    "file": {"auto_mkdir": True},
}
_SECRET: Final = re.compile(r"(?i)((?:access.?key|secret|token|signature|credential)[\w-]*[\"']?\s*[=:]\s*)[^\s&,;]+")
_FINAL: Final = ("NoCredentialsError", "PartialCredentialsError", "NoSuchBucket", "InvalidAccessKeyId", "Forbidden")

OnBytes = Callable[[int], None]


class Objects(Protocol):
    """Names are relative to the store's URL, with '/' between parts. All raise StoreError."""

    url: str

    def put_file(self, path: Path, name: str) -> None:
        """The file's content under this name, as it is when read."""

    def put_bytes(self, data: bytes, name: str) -> None: ...

    def read(self, name: str) -> Iterator[bytes]:
        """In pieces. FileNotFoundError where there is none of that name."""

    def size_bytes(self, name: str) -> int | None:
        """None where there is none of that name."""

    def names(self, prefix: str) -> tuple[str, ...]:
        """The last parts of what lies directly below, ascending."""

    def remove(self, name: str) -> None:
        """Doing it twice changes nothing."""


class FsspecObjects:
    """The real half."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs: Any = None
        self._base = ""

    def put_file(self, path: Path, name: str) -> None:
        with self._asking("put", name):
            fs, key = self._at(name)
            fs.put_file(str(path), key)

    def put_bytes(self, data: bytes, name: str) -> None:
        with self._asking("put", name):
            fs, key = self._at(name)
            fs.pipe_file(key, data)

    def read(self, name: str) -> Iterator[bytes]:
        missing = False
        with self._asking("read", name):
            fs, key = self._at(name)
            try:
                with fs.open(key, "rb", block_size=CHUNK_BYTES, cache_type="readahead") as file:
                    while data := file.read(CHUNK_BYTES):
                        yield data
            except FileNotFoundError:
                missing = True
        if missing:
            raise FileNotFoundError(f"{self.url}/{name}")

    def size_bytes(self, name: str) -> int | None:
        with self._asking("look at", name):
            fs, key = self._at(name)
            try:
                found = fs.info(key)
            except FileNotFoundError:
                return None
            return int(found["size"]) if found["type"] == "file" else None

    def names(self, prefix: str) -> tuple[str, ...]:
        with self._asking("list", prefix):
            fs, key = self._at(prefix)
            try:
                found = fs.ls(key, detail=False, refresh=True) if self.url.startswith("s3:") else fs.ls(key, False)
            except FileNotFoundError:
                return ()
            return tuple(sorted({str(one).rstrip("/").rpartition("/")[2] for one in found}))

    def remove(self, name: str) -> None:
        with self._asking("remove", name):
            fs, key = self._at(name)
            try:
                fs.rm_file(key)
            except FileNotFoundError:
                return

    def _at(self, name: str) -> tuple[Any, str]:
        """The file system and the full name, as it wants it."""
        if self._fs is None:
            self._fs, self._base = _connect(self.url)
        return self._fs, f"{self._base}/{name}".rstrip("/")

    @contextmanager
    def _asking(self, what: str, name: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as e:
            # the library's own exceptions are many, and not known without importing it
            words = f"{type(e).__name__}: {e}"
            again = not isinstance(e, PermissionError) and not any(one in words for one in _FINAL)
            raise StoreError(f"{what} {self.url}/{name}: {_cleaned(words)}", again=again, path=self.url) from e


def _connect(url: str) -> tuple[Any, str]:
    scheme = url.partition("://")[0]
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError as e:
        raise StoreError(f"{url}: {e}; pip install 'outlast[remote]'", again=False, path=url) from e
    try:
        fs, base = fsspec.core.url_to_fs(url, skip_instance_cache=True, **_OPTIONS.get(scheme, {}))
    except (ImportError, ValueError) as e:
        raise StoreError(f"{url}: {e}; s3:// needs pip install 'outlast[remote]'", again=False, path=url) from e
    return fs, str(base).rstrip("/")


def _cleaned(words: str) -> str:
    """What a library says, bounded, and without anything that looks like a key."""
    return _SECRET.sub(r"\1...", words)[:500]
