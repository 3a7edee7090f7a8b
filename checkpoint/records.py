"""Where a tensor's bytes begin in a record of `torch.save`, from the record's first bytes. Pure; nothing is unpickled.

    PK|archive/data.pkl|  ...  PK|archive/byteorder|little  ...  PK|archive/data/0|the tensor's bytes|  tail

torch's zip is stored, not compressed, and a tensor that lies by itself in row-major order is its bytes. The pickle that
describes it is compared, word by word, with the one that torch writes for such a tensor: it is never carried out. What
differs in any way (another order, a view, a newer dtype, compression) is not read here: find_tensor answers None, and
torch itself reads that record.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Final

HEAD_LIMIT_BYTES: Final = 64 << 10
"""A record that has more besides its tensor is none that we know."""
_LOCAL: Final = struct.Struct("<4s5H3I2H")
_ENTRY, _DESCRIPTOR = b"PK\x03\x04", b"PK\x07\x08"
_STORED: Final = 0
_MEMO: Final = frozenset({"BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE", "PROTO", "FRAME"})
_INTS: Final = frozenset({"BININT", "BININT1", "BININT2", "LONG1"})
STORAGES: Final = {
    "torch DoubleStorage": "float64",
    "torch FloatStorage": "float32",
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
    "torch LongStorage": "int64",
    "torch IntStorage": "int32",
    "torch ShortStorage": "int16",
    "torch CharStorage": "int8",
    "torch ByteStorage": "uint8",
    "torch BoolStorage": "bool",
}


@dataclass(frozen=True)
class TensorAt:
    """A tensor that lies in a record as plain bytes."""

    at_bytes: int
    dtype: str
    shape: tuple[int, ...]


def find_tensor(head: bytes) -> TensorAt | None:
    """`head`: the record's first bytes, at least up to the tensor's. None: not plain, or not all there."""
    pickled: bytes | None = None
    order = b"little"  # before torch wrote it down, there was no other
    for name, at in _list_entries(head):
        if name.endswith("/data.pkl"):
            pickled = head[at:]
        elif name.endswith("/byteorder"):
            order = head[at : at + 6]
        elif name.endswith("/data/0"):
            described = _read_pickle(pickled) if pickled is not None and order == b"little" else None
            return None if described is None else TensorAt(at, *described)
    return None


def _list_entries(head: bytes) -> Iterator[tuple[str, int]]:
    """Names and places of a stored zip's entries, in order, as far as `head` goes."""
    at = 0
    while at + _LOCAL.size <= len(head):
        magic, _, _, method, _, _, _, packed, _, name_bytes, extra_bytes = _LOCAL.unpack_from(head, at)
        data_at = at + _LOCAL.size + name_bytes + extra_bytes
        if magic != _ENTRY or method != _STORED or data_at > len(head):
            return
        name = head[at + _LOCAL.size : at + _LOCAL.size + name_bytes].decode("utf-8", "replace")
        yield name, data_at
        at = _find_next(head, data_at, packed)


def _find_next(head: bytes, data_at: int, packed: int) -> int:
    """Sizes stand behind an entry where they are not before it."""
    at = data_at + packed if packed else data_at
    while (at := head.find(_DESCRIPTOR, at)) >= 0:
        _, size = struct.unpack_from("<II", head, at + 8) if at + 16 <= len(head) else (0, -1)
        if size == at - data_at:
            break
        at += 1
    found = head.find(_ENTRY, at) if at >= 0 else -1
    return found if found >= 0 else len(head)


def _read_pickle(raw: bytes) -> tuple[str, tuple[int, ...]] | None:
    """dtype and shape of a tensor that is all of its storage in row-major order; None for anything else."""
    try:
        words = [(op.name, arg) for op, arg, _ in pickletools.genops(raw) if op.name not in _MEMO]
    except (ValueError, IndexError, UnicodeDecodeError):
        return None
    reader = _Words(words)
    try:
        return _read_words(reader)
    except _Other:
        return None


class _Other(Exception):
    """Not the pickle of a plain tensor."""


class _Words:
    """Takes one word after the other, or raises _Other."""

    def __init__(self, words: list[tuple[str, object]]) -> None:
        self._words = iter(words)

    def take(self, *names: str) -> object:
        name, arg = next(self._words, ("", None))
        if name not in names:
            raise _Other
        return arg

    def expect(self, name: str, arg: object) -> None:
        if self.take(name) != arg:
            raise _Other

    def take_int(self) -> int:
        value = self.take(*_INTS)
        if not isinstance(value, int):
            raise _Other
        return value

    def take_ints(self) -> tuple[int, ...]:
        """A tuple of numbers, in any of a pickle's ways to write one."""
        values: list[int] = []
        while True:
            name, arg = next(self._words, ("", None))
            if name in _INTS and isinstance(arg, int):
                values.append(arg)
            elif name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE"):
                return tuple(values)
            elif name != "MARK" or values:
                raise _Other


def _read_words(words: _Words) -> tuple[str, tuple[int, ...]]:
    words.expect("GLOBAL", "torch._utils _rebuild_tensor_v2")
    words.take("MARK")
    words.take("MARK")
    words.expect("BINUNICODE", "storage")
    dtype = STORAGES.get(str(words.take("GLOBAL")))
    words.expect("BINUNICODE", "0")
    words.take("BINUNICODE")  # the device that it was on
    elements = words.take_int()
    words.take("TUPLE")
    words.take("BINPERSID")
    begin, shape, steps = words.take_int(), words.take_ints(), words.take_ints()
    words.take("NEWFALSE", "NEWTRUE")
    words.expect("GLOBAL", "collections OrderedDict")
    for name in ("EMPTY_TUPLE", "REDUCE", "TUPLE", "REDUCE", "STOP"):
        words.take(name)
    if dtype is None or begin != 0 or elements != prod(shape) or not _is_row_major(shape, steps):
        raise _Other
    return dtype, shape


def _is_row_major(shape: tuple[int, ...], steps: tuple[int, ...]) -> bool:
    if len(shape) != len(steps):
        return False
    expected = 1
    for size, step in zip(reversed(shape), reversed(steps), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
