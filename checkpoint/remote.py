"""Checkpoints in an object store: a copy of a committed one, in the order of the commit, read back before it counts.

    upload   files -> each read back and hashed -> manifest.json -> COMMITTED        fetch   the same, backwards

Below the URL lies `iter_N/` with the same names as on the shared file system, so a copy loads with any reader. What
dies half-way leaves no COMMITTED, and the next upload sends only what is missing. A download goes under a temporary
name, is compared with the manifest while it is written, and is named last. Nothing is unpickled here.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import xxhash

from outlast.checkpoint.commit import replace_file, write_file, write_tracker
from outlast.checkpoint.errors import CheckpointError, ManifestError, NotCommitted, NotWhole, StoreError
from outlast.checkpoint.manifest import MANIFEST, MARKER, FileEntry, Manifest, open_marked
from outlast.checkpoint.names import FETCHING, name_step, parse_step
from outlast.checkpoint.objects import Objects, OnBytes
from outlast.checkpoint.ops import HashedFile, Ops, RealOps
from outlast.checkpoint.prints import FILE as PRINTS_FILE
from outlast.checkpoint.prints import MAX_BYTES as PRINTS_MAX_BYTES
from outlast.checkpoint.retention import plan_removal
from outlast.checkpoint.store import Store
from outlast.checkpoint.tiers import Tier, write_tier
from outlast.checkpoint.verify import MANIFEST_MAX_BYTES, MARKER_MAX_BYTES, verify
from outlast.reliability.model import Noun

AT_ONCE: Final = 4
LEASE: Final = "upload"
DESERTED_S: Final = 86_400.0
SPARE_BYTES: Final = 64 << 20


class Uploaded(Noun, frozen=True, kw_only=True):
    """What an upload did."""

    train_step: int
    url: str
    sent_bytes: int
    size_bytes: int
    """Of all files; what was there already and hashed right was not sent again."""
    seconds: float


def _ignore(_count: int) -> None:
    """Nobody watches."""


class Remote:
    """The checkpoints below one URL."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects

    @property
    def url(self) -> str:
        return self.objects.url

    def steps(self) -> tuple[int, ...]:
        """Train_steps with a commit marker, ascending."""
        found = (parse_step(name) for name in self.objects.names(""))
        return tuple(sorted(s for s in found if s is not None and self.objects.size_bytes(_name(s, MARKER))))

    def manifest(self, train_step: int) -> Manifest:
        """Of a committed one. Raises NotWhole."""
        return self._read_promise(train_step)[2]

    def upload(self, store: Store, train_step: int, *, on_bytes: OnBytes = _ignore) -> Uploaded:
        """Copy a committed checkpoint there. It is leased meanwhile, so that no prune takes it.

        Raises NotWhole where it is not what its manifest says, StoreError where the object store does not answer.
        """
        began_s = time.monotonic()
        _release_deserted(store)
        store.lease(train_step, LEASE)
        try:
            sent_bytes, manifest = self._send(store.path(train_step), train_step, on_bytes)
        finally:
            store.release(train_step, LEASE)
        with suppress(OSError):  # a note only; the copy is there
            write_tier(RealOps(), store.path(train_step), train_step, Tier.REMOTE, self.url)
        return Uploaded(
            train_step=train_step,
            url=f"{self.url}/{name_step(train_step)}",
            sent_bytes=sent_bytes,
            size_bytes=sum(entry.size_bytes for entry in manifest.files.values()),
            seconds=time.monotonic() - began_s,
        )

    def fetch(
        self, train_step: int, root: Path, *, replace: bool = True, ops: Ops | None = None, on_bytes: OnBytes = _ignore
    ) -> Path:
        """Bring one back below `root`. One that is there and whole stays; what is not makes room, and is kept.

        replace=False: where one lies there without a marker it may be a save in flight, and this is refused.
        Raises NotWhole where the copy is not what its manifest says: nothing gets its name then.
        """
        ops = ops or RealOps()
        target = root / name_step(train_step)
        root.mkdir(parents=True, exist_ok=True)
        try:
            verify(target)
            return target
        except NotCommitted as e:
            if target.exists() and not replace:
                raise CheckpointError(f"{target}: a save that did not finish, or is under way: move it away") from e
        except NotWhole:
            pass  # it makes room below
        marker, raw, manifest = self._read_promise(train_step)
        _require_room(root, sum(entry.size_bytes for entry in manifest.files.values()))
        _clear_deserted(root)
        draft = root / f"{FETCHING}{name_step(train_step)}.{socket.gethostname()}.{os.getpid()}"
        try:
            draft.mkdir()
            self._receive(ops, draft, train_step, manifest, on_bytes)
            replace_file(ops, draft, MANIFEST, raw)
            replace_file(ops, draft, MARKER, marker)
            verify(draft, hashes=False)
            Store(root).set_aside(train_step)
            ops.rename(draft, target)
            ops.sync_dir(root)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        with suppress(OSError):
            write_tier(ops, target, train_step, Tier.REMOTE, self.url)
            write_tracker(ops, root, max(Store(root).durable_steps()))
        return target

    def prune(self, keep_last: int, *, verified: int, keep: Collection[int] = ()) -> tuple[int, ...]:
        """Remove old ones, COMMITTED first, and what was left half sent before `verified`, which was just read back.

        As on the shared file system: never `verified` nor anything newer.
        """
        committed = self.steps()
        if verified not in committed:
            return ()
        gone = plan_removal(committed, keep_last=keep_last, keep=keep, verified=verified)
        found = {parse_step(name) for name in self.objects.names("")} - {None}
        torn = {step for step in found if step is not None and step < verified} - {*committed}
        for step in (*gone, *sorted(torn)):
            self._remove(name_step(step))
        return gone

    # ------------------------------------------------------------------ there

    def _send(self, directory: Path, train_step: int, on_bytes: OnBytes) -> tuple[int, Manifest]:
        verify(directory, hashes=False)  # sizes: their hashes are those of what comes back
        marker, raw = (directory / MARKER).read_bytes(), (directory / MANIFEST).read_bytes()
        manifest = _open(train_step, marker, raw)
        there = self._read_small(_name(train_step, MARKER), MARKER_MAX_BYTES)
        if there not in (None, marker):
            # another save of this train_step: it ends being one before its files change
            self.objects.remove(_name(train_step, MARKER))

        def send(item: tuple[str, FileEntry]) -> int:
            return self._put(directory / item[0], _name(train_step, item[0]), item[1], on_bytes)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            sent = sum(pool.map(send, sorted(manifest.files.items())))
        with suppress(FileNotFoundError):
            self._put_small((directory / PRINTS_FILE).read_bytes(), _name(train_step, PRINTS_FILE))
        self._put_small(raw, _name(train_step, MANIFEST))
        self._put_small(marker, _name(train_step, MARKER))
        return sent, manifest

    def _put(self, path: Path, name: str, entry: FileEntry, on_bytes: OnBytes) -> int:
        """Bytes that were sent: none where it is there and hashes right."""
        if self._is_there(name, entry):
            on_bytes(entry.size_bytes)
            return 0
        for _ in range(2):
            self.objects.put_file(path, name)
            if self._is_there(name, entry):
                on_bytes(entry.size_bytes)
                return entry.size_bytes
        raise NotWhole(
            path.parent.name, (f"{path.name}: what {self.url} gives back is not what the manifest says, sent twice",)
        )

    def _is_there(self, name: str, entry: FileEntry) -> bool:
        if self.objects.size_bytes(name) != entry.size_bytes:
            return False
        digest = xxhash.xxh3_128()
        try:
            for data in self.objects.read(name):
                digest.update(data)
        except FileNotFoundError:
            return False
        return digest.hexdigest() == entry.xxh3_128

    def _put_small(self, data: bytes, name: str) -> None:
        if self._read_small(name, len(data)) == data:
            return
        self.objects.put_bytes(data, name)
        if self._read_small(name, len(data)) != data:
            raise StoreError(f"{self.url}/{name}: comes back with another content than was put", again=True)

    def _remove(self, folder: str) -> None:
        self.objects.remove(f"{folder}/{MARKER}")
        for name in self.objects.names(folder):
            self.objects.remove(f"{folder}/{name}")

    # ------------------------------------------------------------------ back

    def _read_promise(self, train_step: int) -> tuple[bytes, bytes, Manifest]:
        """Marker, manifest as it is, manifest."""
        marker = self._read_small(_name(train_step, MARKER), MARKER_MAX_BYTES)
        raw = self._read_small(_name(train_step, MANIFEST), MANIFEST_MAX_BYTES)
        if marker is None or raw is None:
            raise NotWhole(name_step(train_step), (f"{self.url}: no {MARKER if marker is None else MANIFEST} there",))
        return marker, raw, _open(train_step, marker, raw)

    def _receive(self, ops: Ops, draft: Path, train_step: int, manifest: Manifest, on_bytes: OnBytes) -> None:
        for name in manifest.files:
            for parent in reversed((draft / name).relative_to(draft).parents[:-1]):
                ops.make_dir(draft / parent)

        def receive(item: tuple[str, FileEntry]) -> None:
            self._receive_one(ops, draft, train_step, item, on_bytes)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            for _ in pool.map(receive, sorted(manifest.files.items())):
                pass  # what went wrong in a thread is raised here
        prints = self._read_small(_name(train_step, PRINTS_FILE), PRINTS_MAX_BYTES)
        if prints is not None:
            replace_file(ops, draft, PRINTS_FILE, prints)
        for folder in {(draft / name).parent for name in manifest.files} | {draft}:
            ops.sync_dir(folder)

    def _receive_one(
        self, ops: Ops, draft: Path, train_step: int, item: tuple[str, FileEntry], on_bytes: OnBytes
    ) -> None:
        name, entry = item

        def fill(out: HashedFile) -> None:
            for data in self.objects.read(_name(train_step, name)):
                out.write(data)
                on_bytes(len(data))
                if out.tell() > entry.size_bytes:
                    return  # longer than promised: refused below, before it fills the disk

        try:
            found = write_file(ops, draft / name, fill)
        except FileNotFoundError as e:
            raise NotWhole(name_step(train_step), (f"{name}: missing in {self.url}",)) from e
        if found != entry:
            what = f"{found.size_bytes:,} bytes, xxh3_128 {found.xxh3_128}; its manifest says otherwise"
            raise NotWhole(name_step(train_step), (f"{name} in {self.url}: {what}",))

    def _read_small(self, name: str, limit_bytes: int) -> bytes | None:
        """None where there is none of that name. Longer than the limit is cut one byte behind it: no pair fits then."""
        data = bytearray()
        try:
            for piece in self.objects.read(name):
                data += piece
                if len(data) > limit_bytes:
                    break
        except FileNotFoundError:
            return None
        return bytes(data[: limit_bytes + 1])


def _name(train_step: int, file: str) -> str:
    return f"{name_step(train_step)}/{file}"


def _open(train_step: int, marker: bytes, raw: bytes) -> Manifest:
    try:
        manifest = open_marked(marker, raw)
    except ManifestError as e:
        raise NotWhole(name_step(train_step), (str(e),)) from e
    if manifest.train_step != train_step:
        raise NotWhole(name_step(train_step), (f"its manifest says train_step {manifest.train_step}",))
    return manifest


def _require_room(root: Path, needed_bytes: int) -> None:
    info = os.statvfs(root)
    free_bytes = info.f_bavail * info.f_frsize
    if free_bytes < needed_bytes + SPARE_BYTES:
        raise CheckpointError(
            f"{root}: {free_bytes:,} bytes free, the checkpoint has {needed_bytes:,}: make room, then fetch again",
            path=str(root),
        )


def _clear_deserted(root: Path) -> None:
    """What downloads that died have left: of this node those whose process is gone, of others after a day."""
    for draft in root.glob(f"{FETCHING}*"):
        _, _, rest = draft.name.removeprefix(FETCHING).partition(".")
        node, _, pid = rest.rpartition(".")
        with suppress(OSError):
            dead = node == socket.gethostname() and pid.isdecimal() and not Path(f"/proc/{pid}").exists()
            if dead or draft.stat().st_mtime < time.time() - DESERTED_S:
                shutil.rmtree(draft, ignore_errors=True)


def _release_deserted(store: Store) -> None:
    """Leases of uploads that died."""
    with suppress(OSError):
        for lease in (store.directory / "leases").glob(f"*.{LEASE}"):
            step = parse_step(lease.name.partition(".")[0])
            if step is not None and lease.stat().st_mtime < time.time() - DESERTED_S:
                store.release(step, LEASE)
