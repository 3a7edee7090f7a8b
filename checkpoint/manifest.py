"""The manifest of a checkpoint: what was saved, file by file, and what it was saved from. Pure: bytes in, bytes out.

    iter_0000030/__0_0.distcp  common.pt  .metadata  metadata.json      as Megatron's torch_dist writes them
                 manifest.json      every file above with size and hash, and step, samples, layout, identity
                 COMMITTED          written last; holds the manifest's own hash, so a changed manifest is found

It is not a cryptographic seal: xxh3_128 finds torn, short, swapped and rotten files, not a forger who may write the
directory. It still comes from a shared file system, so decoding trusts nothing: types are strict, and a file name
that could lead out of the checkpoint's directory is refused by name before anything is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
import xxhash

from outlast.checkpoint.errors import ManifestError
from outlast.reliability.model import Layout, Noun

SCHEMA: Final = 1
MANIFEST: Final = "manifest.json"
MARKER: Final = "COMMITTED"
OURS: Final = frozenset({MANIFEST, MARKER})
PATH_CHARS: Final = 1024
NAME_BYTES: Final = 255  # NAME_MAX of the usual Linux file systems

Size = Annotated[int, msgspec.Meta(ge=0)]
Hash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]
Step = Annotated[int, msgspec.Meta(ge=0, le=9_999_999_999)]


class FileEntry(Noun, frozen=True, kw_only=True):
    """One file, as its writer wrote it."""

    size_bytes: Size
    xxh3_128: Hash


class DataFrontier(Noun, frozen=True, kw_only=True):
    """How far the data was consumed: the committed point of consumption, never a loader's cursor."""

    consumed: Size = 0
    """Samples [0, consumed) were used or skipped."""
    skipped: tuple[tuple[Size, Size], ...] = ()
    """Half-open ranges below `consumed` that were left out on purpose, ascending."""


class Identity(Noun, frozen=True, kw_only=True):
    """What the state belongs to, as short strings that compare equal or not; '' where it is not known."""

    rng: str = ""
    code: str = ""
    data: str = ""


class Manifest(Noun, frozen=True, kw_only=True):
    schema: int
    train_step: Step
    samples: Size
    """Samples consumed when it was taken."""
    layout: Layout
    files: dict[str, FileEntry]
    """Path relative to the checkpoint's directory -> size and hash; all files but manifest.json and COMMITTED."""
    identity: Identity = Identity()
    pins: dict[str, str] = msgspec.field(default_factory=dict)
    """Content hashes of what it was made from: data, image, code, tokenizer, parent."""
    parents: tuple[str, ...] = ()
    """Checkpoints that it descends from directly, usually the one that the attempt restored."""
    data_frontier: DataFrontier = DataFrontier()
    made_at_s: float = 0.0
    made_by: str = ""


class Marker(Noun, frozen=True, kw_only=True):
    """The content of COMMITTED."""

    train_step: Step
    manifest_bytes: Size
    manifest_xxh3_128: Hash


class _Head(msgspec.Struct):
    """What every schema has."""

    schema: int


class Found(Noun, frozen=True, kw_only=True):
    """One file as it lies on disk."""

    size_bytes: int
    xxh3_128: str | None = None
    """None: not hashed (yet)."""
    refused: str = ""
    """Why it was not read: a symbolic link, not a regular file, unreadable; '' where it was."""
    unreadable: bool = False
    """True: the file system did not give it to us, which says nothing of what is in it."""


def hash_bytes(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def encode_manifest(manifest: Manifest) -> bytes:
    """Readable JSON, one file a line. Refuses what decode_manifest would refuse."""
    raw = msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=1) + b"\n"
    decode_manifest(raw)
    return raw


def decode_manifest(raw: bytes) -> Manifest:
    """The manifest in these bytes, or ManifestError that says what is wrong where."""
    try:
        head = msgspec.json.decode(raw, type=_Head)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise ManifestError(f"{MANIFEST}: no manifest of ours: {e}") from e
    if head.schema != SCHEMA:
        raise ManifestError(
            f"{MANIFEST}: schema {head.schema}; this version reads {SCHEMA}. Use the outlast it is from"
        )
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise ManifestError(f"{MANIFEST}: {e}") from e
    _refuse_bad_content(manifest)
    return manifest


def _refuse_bad_content(manifest: Manifest) -> None:
    for path in manifest.files:
        if why := unsafe_path(path):
            raise ManifestError(f"{MANIFEST}: $.files: {path[:200]!r} {why}; refused, nothing was opened")
    if not manifest.files:
        raise ManifestError(f"{MANIFEST}: $.files: empty; a checkpoint has at least one file")
    last = 0
    for start, end in manifest.data_frontier.skipped:
        if not last <= start < end <= manifest.data_frontier.consumed:
            raise ManifestError(
                f"{MANIFEST}: $.data_frontier.skipped: [{start}, {end}) is empty, out of order, or beyond "
                f"consumed {manifest.data_frontier.consumed}"
            )
        last = end


def unsafe_path(path: str) -> str:
    """'' for a relative path that stays below its directory; else why not, as the end of a sentence."""
    parts = path.split("/")
    if not path or len(path) > PATH_CHARS or any(len(p.encode("utf-8", "replace")) > NAME_BYTES for p in parts):
        return f"is empty or longer than {PATH_CHARS} characters in all, {NAME_BYTES} bytes a name"
    if path.startswith("/"):
        return "is absolute"
    if any(p in ("", ".", "..") for p in parts):
        return "has an empty, '.' or '..' part"
    if not path.isprintable() or "\\" in path:
        return "has control characters or a backslash"
    if path in OURS:
        return "is the manifest's or the marker's own name"
    return ""


def encode_marker(manifest_raw: bytes, train_step: int) -> bytes:
    marker = Marker(train_step=train_step, manifest_bytes=len(manifest_raw), manifest_xxh3_128=hash_bytes(manifest_raw))
    return msgspec.json.encode(marker) + b"\n"


def open_marked(marker_raw: bytes, manifest_raw: bytes) -> Manifest:
    """The manifest that this marker commits, or ManifestError where the two do not belong together."""
    try:
        marker = msgspec.json.decode(marker_raw, type=Marker)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise ManifestError(f"{MARKER}: torn or not ours ({len(marker_raw)} bytes): {e}") from e
    if len(manifest_raw) != marker.manifest_bytes or hash_bytes(manifest_raw) != marker.manifest_xxh3_128:
        raise ManifestError(
            f"{MANIFEST}: {len(manifest_raw):,} bytes, xxh3_128 {hash_bytes(manifest_raw)}; {MARKER} says "
            f"{marker.manifest_bytes:,} bytes, {marker.manifest_xxh3_128} (changed after the commit)"
        )
    manifest = decode_manifest(manifest_raw)
    if manifest.train_step != marker.train_step:
        raise ManifestError(
            f"{MARKER}: train_step {marker.train_step}, but its manifest says train_step {manifest.train_step}"
        )
    if marker_raw != encode_marker(manifest_raw, manifest.train_step):
        raise ManifestError(
            f"{MARKER}: {len(marker_raw)} bytes that say the right thing in other words: torn or edited"
        )
    return manifest


def name_kind(path: str) -> str:
    """What a file of a torch_dist checkpoint is, in words for a person."""
    if path.endswith(".distcp"):
        return "model shard"
    return {"common.pt": "common state", ".metadata": "shard index", "metadata.json": "format file"}.get(path, "file")


def check(files: Mapping[str, FileEntry], found: Mapping[str, Found]) -> tuple[str, ...]:
    """What is wrong with these files of a manifest, a sentence each in path order; () where all is as it says.

    A file without a hash in `found` is checked by its size alone. Files that the manifest does not list are ignored:
    nothing reads them.
    """
    said = (_compare(path, entry, found.get(path)) for path, entry in sorted(files.items()))
    return tuple(s for s in said if s)


def _compare(path: str, entry: FileEntry, got: Found | None) -> str:
    what = f"{name_kind(path)} {path}"
    if got is None:
        return f"{what}: missing, manifest says {entry.size_bytes:,} bytes"
    if got.refused:
        return f"{what}: {got.refused}"
    if got.size_bytes != entry.size_bytes:
        how = "truncated" if got.size_bytes < entry.size_bytes else "longer than it was written"
        return f"{what}: {got.size_bytes:,} bytes, manifest says {entry.size_bytes:,} ({how})"
    if got.xxh3_128 is not None and got.xxh3_128 != entry.xxh3_128:
        return f"{what}: xxh3_128 {got.xxh3_128}, manifest says {entry.xxh3_128} (changed)"
    return ""
