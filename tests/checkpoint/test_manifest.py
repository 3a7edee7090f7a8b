"""The manifest: strict decoding, hostile paths, the words for what is wrong, and fuzz over all of it."""

from __future__ import annotations

import os
from pathlib import PurePosixPath

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.errors import ManifestError
from outlast.checkpoint.manifest import (
    MARKER,
    DataFrontier,
    FileEntry,
    Found,
    Manifest,
    check,
    decode_manifest,
    encode_manifest,
    encode_marker,
    open_marked,
    unsafe_path,
)
from outlast.reliability.model import Layout

ZERO = "0" * 32


def make_manifest(**changes: object) -> Manifest:
    files = {
        "__0_0.distcp": FileEntry(size_bytes=10, xxh3_128=ZERO),
        "common.pt": FileEntry(size_bytes=1, xxh3_128=ZERO),
    }
    fields = {"schema": 1, "train_step": 30, "samples": 240, "layout": Layout(tp=2, dp=2), "files": files, **changes}
    return Manifest(**fields)  # type: ignore[arg-type]


def with_path(path: str) -> bytes:
    raw = msgspec.json.decode(encode_manifest(make_manifest()))
    raw["files"][path] = raw["files"]["common.pt"]
    return msgspec.json.encode(raw)


def test_what_is_written_is_read() -> None:
    frontier = DataFrontier(consumed=240, skipped=((8, 16), (16, 24)))
    manifest = make_manifest(data_frontier=frontier, pins={"data": "sha256:ab"}, parents=("iter_0000020",))
    raw = encode_manifest(manifest)
    assert decode_manifest(raw) == manifest
    assert open_marked(encode_marker(raw, 30), raw) == manifest
    assert raw.count(b"\n") > 10, "a person can read it"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/etc/passwd", "is absolute"),
        ("../other/x", "'..' part"),
        ("a/../../x", "'..' part"),
        ("a//b", "empty"),
        ("./a", "'.'"),
        ("a/", "empty"),
        ("", "is empty"),
        ("a\x00b", "control"),
        ("a\nb", "control"),
        ("a\\b", "backslash"),
        ("\u202eab", "control"),
        ("x" * 256, "longer"),
        ("a/" * 600 + "a", "longer"),
        ("manifest.json", "own name"),
        ("COMMITTED", "own name"),
    ],
)
def test_a_hostile_path_is_refused_by_name(path: str, why: str) -> None:
    assert why in unsafe_path(path)
    with pytest.raises(ManifestError) as e:
        decode_manifest(with_path(path))
    assert "$.files" in str(e.value) and repr(path[:200]) in str(e.value) and "refused" in str(e.value)


@given(st.text(st.sampled_from("ab./\\\x00~\u202e "), max_size=12) | st.text(max_size=30))
def test_a_path_that_passes_stays_below_its_directory(path: str) -> None:
    if not unsafe_path(path):
        joined = os.path.normpath(f"/c/iter_0000001/{path}")
        assert joined == f"/c/iter_0000001/{path}"
        assert ".." not in PurePosixPath(path).parts


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "schema 2; this version reads 1"),
        ({"train_step": -1}, "$.train_step"),
        ({"train_step": "30"}, "$.train_step"),
        ({"surprise": 1}, "surprise"),
        ({"files": {}}, "at least one file"),
        ({"files": {"a": {"size_bytes": -1, "xxh3_128": ZERO}}}, "size_bytes"),
        ({"files": {"a": {"size_bytes": 1, "xxh3_128": "XYZ"}}}, "xxh3_128"),
        ({"files": {"a": {"size_bytes": 1}}}, "xxh3_128"),
        ({"data_frontier": {"consumed": 8, "skipped": [[4, 9]]}}, "skipped"),
        ({"data_frontier": {"consumed": 8, "skipped": [[4, 4]]}}, "skipped"),
        ({"data_frontier": {"consumed": 8, "skipped": [[4, 6], [2, 4]]}}, "skipped"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, object], words: str) -> None:
    raw = msgspec.json.decode(encode_manifest(make_manifest()))
    with pytest.raises(ManifestError, match=r"manifest\.json") as e:
        decode_manifest(msgspec.json.encode({**raw, **change}))
    assert words in str(e.value)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_bytes_give_a_manifest_error(marker: bytes, raw: bytes) -> None:
    with pytest.raises(ManifestError):
        decode_manifest(raw)
    with pytest.raises(ManifestError):
        open_marked(marker, raw)


@given(st.data())
def test_a_damaged_pair_is_never_taken_for_another(data: st.DataObject) -> None:
    manifest = make_manifest()
    raw = encode_manifest(manifest)
    pair = [encode_marker(raw, 30), raw]
    which = data.draw(st.integers(0, 1))
    at = data.draw(st.integers(0, len(pair[which]) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "double"]))
    old = pair[which]
    flipped = old[:at] + bytes([old[at] ^ (1 << data.draw(st.integers(0, 7)))]) + old[at + 1 :]
    pair[which] = {"flip": flipped, "cut": old[:at], "double": old[:at] + old[at:] * 2}[how]
    with pytest.raises(ManifestError):
        open_marked(*pair)


def test_a_marker_of_another_step_is_refused() -> None:
    raw = encode_manifest(make_manifest())
    with pytest.raises(ManifestError, match="train_step 31, but its manifest says train_step 30"):
        open_marked(encode_marker(raw, 31), raw)
    with pytest.raises(ManifestError, match="changed after the commit"):
        open_marked(encode_marker(raw, 30), encode_manifest(make_manifest(samples=241)))
    with pytest.raises(ManifestError, match=f"{MARKER}: torn or not ours"):
        open_marked(b"", raw)


def test_the_words_for_what_is_wrong() -> None:
    files = {
        "__3_1.distcp": FileEntry(size_bytes=1_073_741_824, xxh3_128=ZERO),
        ".metadata": FileEntry(size_bytes=5, xxh3_128=ZERO),
        "common.pt": FileEntry(size_bytes=7, xxh3_128=ZERO),
        "metadata.json": FileEntry(size_bytes=9, xxh3_128=ZERO),
        "extra/note": FileEntry(size_bytes=1, xxh3_128=ZERO),
    }
    good = {path: Found(size_bytes=entry.size_bytes, xxh3_128=ZERO) for path, entry in files.items()}
    assert check(files, good) == ()
    assert check(files, {**good, "not listed": Found(size_bytes=1)}) == ()
    bad = {
        "__3_1.distcp": Found(size_bytes=1_073_741_312),
        ".metadata": Found(size_bytes=5, xxh3_128="1" * 32),
        "metadata.json": Found(size_bytes=10),
        "extra/note": Found(size_bytes=-1, refused="is a symbolic link (refused)"),
    }
    assert check(files, bad) == (
        f"shard index .metadata: xxh3_128 {'1' * 32}, manifest says {ZERO} (changed)",
        "model shard __3_1.distcp: 1,073,741,312 bytes, manifest says 1,073,741,824 (truncated)",
        "common state common.pt: missing, manifest says 7 bytes",
        "file extra/note: is a symbolic link (refused)",
        "format file metadata.json: 10 bytes, manifest says 9 (longer than it was written)",
    )


@given(
    st.dictionaries(st.sampled_from("abcde"), st.integers(0, 3), min_size=1),
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(0, 3), st.sampled_from([None, ZERO, "1" * 32]))),
)
def test_check_is_silent_exactly_where_all_fits(sizes: dict[str, int], lies: dict[str, tuple[int, str | None]]) -> None:
    files = {path: FileEntry(size_bytes=size, xxh3_128=ZERO) for path, size in sizes.items()}
    found = {path: Found(size_bytes=size, xxh3_128=digest) for path, (size, digest) in lies.items()}
    fits = {p for p in files if p in lies and lies[p][0] == sizes[p] and lies[p][1] in (None, ZERO)}
    assert len(check(files, found)) == len(files) - len(fits)
