"""Facts of checkpoints and of the storage under them: listings, pointers, loads and writes that failed. Pure.

A listing is a line `NAME/ file file size ...`, a line `NAME:` with rows below it, or several names in one line. What is
complete is not decided here: no file is proof by its name alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from outlast.reliability.judging.case import Line
from outlast.reliability.judging.facts import Fact
from outlast.reliability.judging.facts_run import LoadFailed, PointerSeen, SaveSeen, WriteFailed
from outlast.reliability.judging.read_gpu import where

_DIR: Final = re.compile(r"(?<![\w./-])((?:[A-Za-z][A-Za-z0-9]{0,40}[-_])+0*([0-9]{1,10}))/(?=\s|$)")
_HEAD: Final = re.compile(
    r"^\s{0,8}(?:\./)?(?:[\w.-]{1,80}/){0,6}((?:[A-Za-z][A-Za-z0-9]{0,40}[-_])+0*([0-9]{1,10}))/?:$"
)
_POINTER: Final = re.compile(r"^\s{0,8}latest {0,3}-> {0,3}(?:\S{0,200}/)?(\S{1,80})$")
_TRACKER: Final = re.compile(r"latest_checkpointed_iteration\.txt[`' ]{0,2}(?::| contains| =)? {0,3}([0-9]{1,10})\b")
_NO_TRACKER: Final = re.compile(
    r"(?:latest\S{0,40}|tracker(?: file)?) (?:is )?(?:absent|missing)|found no tracker|no tracker"
)
_NONE_OF: Final = re.compile(r"\(no (\.?[\w.*-]{2,60})\)")
_FILE: Final = re.compile(
    r"(?<![\w/.'-])(\.?[A-Za-z_][\w.-]{0,80}\.[A-Za-z]{1,14}|\.metadata|COMMITTED|__[0-9]{1,6}_[0-9]{1,6}\.distcp)"
    r"(?:\s{1,4}([0-9]{1,16})(?=\s|$))?"
)
_SAVE_NAME: Final = re.compile(r"((?:[A-Za-z][A-Za-z0-9]{0,40}[-_])+[0-9]{1,10})/\S{1,200}")

_LOAD: Final = (
    ("layout", re.compile(r"size mismatch for |Missing key\(s\) in state_dict|Unexpected key\(s\)|shape mismatch")),
    (
        "unreadable",
        re.compile(
            r"PytorchStreamReader failed|failed finding central directory|archive is corrupted|UnpicklingError"
            r"|Ran out of input|SafetensorError|HeaderTooLarge|checksum mismatch|hash mismatch|unexpected EOF"
            r"|is truncated"
        ),
    ),
    (
        "missing_file",
        re.compile(
            r"metadata is None|is not a distributed checkpoint"
            r"|FileNotFoundError: .{0,80}No such file or directory: .?\S{0,200}"
        ),
    ),
)
_LOADING: Final = re.compile(
    r"\b(?:load|loading|resume|restor|ckpt|checkpoint|iter_|step_|\.distcp|\.pt|\.safetensors)"
)
_WRITE: Final = (
    (
        "full",
        re.compile(r"No space left on device|Disk quota exceeded|\b(?:100|99)% (?:used|full)|\s100% {1,8}/|\bEDQUOT\b"),
    ),
    ("stale", re.compile(r"Stale file handle|Transport endpoint is not connected|shutdown transport endpoint")),
    ("io", re.compile(r"Input/output error|\[Errno 5\]")),
    ("short", re.compile(r"PytorchStreamWriter failed|unexpected pos [0-9]{1,20} vs")),
)
_NODES: Final = re.compile(r"\b([0-9]{1,6}) (?:different )?(?:nodes|hosts|machines)\b")


def read_saves(lines: Sequence[Line]) -> Iterator[Fact]:
    """Listings and pointers over all lines of a text."""
    head: tuple[str, int, int] | None = None
    rows: list[str] = []
    for line in lines:
        start = _HEAD.match(line.text)
        if start:
            yield from _below(head, rows)
            head, rows = (start[1], int(start[2]), line.id), []
            continue
        if head is not None and line.text.strip() and not _DIR.search(line.text):
            rows.append(line.text)
            continue
        yield from _below(head, rows)
        head, rows = None, []
        yield from _in_line(line)
        yield from _pointers(line)
    yield from _below(head, rows)


def _below(head: tuple[str, int, int] | None, rows: Sequence[str]) -> Iterator[Fact]:
    if head is not None and rows:
        yield _save(head[2], head[0], head[1], "\n".join(rows))


def _in_line(line: Line) -> Iterator[Fact]:
    found = list(_DIR.finditer(line.text))
    ends = [*(m.start() for m in found[1:]), len(line.text)]
    for m, end in zip(found, ends, strict=False):
        yield _save(line.id, m[1], int(m[2]), line.text[m.end() : end])


def _save(id_: int, name: str, step: int, text: str) -> SaveSeen:
    missing = tuple(_NONE_OF.findall(text))
    found = [(m[1], m[2]) for m in _FILE.finditer(_NONE_OF.sub(" ", text))]
    found += [(m[2], m[1]) for m in re.finditer(r"\s([0-9]{1,16}) .{0,40}?\s(\S{1,80}\.\w{1,14})$", text, re.MULTILINE)]
    return SaveSeen(
        id=id_,
        name=name,
        step=step,
        files=tuple(dict.fromkeys(f for f, _ in found)),
        empty=tuple(f for f, size in found if size == "0"),
        sizes=tuple(int(size) for _, size in found if size),
        missing=missing,
    )


def _pointers(line: Line) -> Iterator[Fact]:
    to, tracker = _POINTER.match(line.text), _TRACKER.search(line.text)
    if to:
        yield PointerSeen(id=line.id, to=to[1].rstrip("/"))
    elif tracker:
        yield PointerSeen(id=line.id, to=tracker[1])
    elif _NO_TRACKER.search(line.text):
        yield PointerSeen(id=line.id, to="")


def read_storage(line: Line) -> Iterator[Fact]:
    """A load or a write that ended badly."""
    text = line.text
    for why, regex in _LOAD:
        if regex.search(text) and (why == "unreadable" or _LOADING.search(text)):
            named = _SAVE_NAME.search(text)
            yield LoadFailed(**where(line), why=why, name=named[1] if named else "", text=text[:300])
            break
    for why, regex in _WRITE:
        # a node's own memory is no storage that runs share: that it is full is the program's
        if regex.search(text) and "/dev/shm" not in text:
            many = _NODES.search(text)
            said = int(many[1]) if many and "other" not in text else line.label.nodes
            yield WriteFailed(**where(line), why=why, nodes=said)
            break
