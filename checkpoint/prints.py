"""The fingerprints of one save, as a file beside the manifest, and the comparison with what a restore gave. No torch.

    iter_0000030/fingerprints.json    scheme, train_step, one entry a logical tensor; ends with a hash of itself

It is a file of its own because it may be written after COMMITTED, and it stays out of the manifest for that reason: a
checkpoint without it is whole, but a restore of it cannot be checked beyond its files. fingerprint.py defines the
numbers, live_prints.py takes them from a training process.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import msgspec

from outlast.checkpoint.commit import replace_file
from outlast.checkpoint.errors import CheckpointError, NotWhole
from outlast.checkpoint.manifest import Hash, Step, hash_bytes
from outlast.checkpoint.ops import Ops
from outlast.reliability.model import Noun

FILE: Final = "fingerprints.json"
SCHEMA: Final = 1
MAX_BYTES: Final = 256 << 20
SHOWN: Final = 5

Number = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}$")]


class TensorPrint(Noun, frozen=True, kw_only=True):
    """One logical tensor: a weight, its main copy or a moment of it, over all ranks."""

    dtype: str
    """As torch names it: float32, bfloat16, float8_e4m3fn."""
    shape: tuple[int, ...]
    """Unpadded."""
    fingerprint: Number


class Prints(Noun, frozen=True, kw_only=True):
    """All fingerprints of one save."""

    schema: int = SCHEMA
    scheme: str
    """fingerprint.SCHEME: which sum it is."""
    train_step: Step
    tensors: dict[str, TensorPrint]
    """`decoder.layers.3.mlp.linear_fc1.weight`, and with `:main`, `:exp_avg`, `:step` its optimizer state."""
    left_out: dict[str, str] = msgspec.field(default_factory=dict)
    """Tensors without a fingerprint, and why."""


class _File(Noun, frozen=True, kw_only=True):
    prints: Prints
    xxh3_128: Hash
    """Of the prints, encoded as encode_prints does."""


class NotAsSaved(CheckpointError):
    """A restore gave other values than were saved. `problems` names each tensor, with what was found."""

    def __init__(self, path: str, problems: tuple[str, ...], *, of: int) -> None:
        shown = "; ".join(problems[:SHOWN]) + (f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else "")
        super().__init__(
            f"checkpoint {path}: after the restore {len(problems)} of {of} tensors are not as they were saved: {shown}"
            ". Its files are whole, so it was written or read wrongly: `outlast doctor` tells the faults of this "
            "megatron-core. Not trained on; take an older one",
            path=path,
        )
        self.problems = problems


def encode_prints(prints: Prints) -> bytes:
    """One tensor a line."""
    raw = msgspec.json.encode(prints, order="deterministic")
    file = _File(prints=prints, xxh3_128=hash_bytes(raw))
    # inside a string every quote has a backslash before it, so these two end a tensor's entry and nothing else
    return msgspec.json.encode(file, order="deterministic").replace(b'},"', b'},\n"') + b"\n"


def decode_prints(raw: bytes) -> Prints:
    """Raises CheckpointError where it is torn, changed or of another version."""
    try:
        file = msgspec.json.decode(raw, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise CheckpointError(f"{FILE}: {e}") from e
    if file.prints.schema != SCHEMA:
        raise CheckpointError(f"{FILE}: schema {file.prints.schema}; this version reads {SCHEMA}")
    found = hash_bytes(msgspec.json.encode(file.prints, order="deterministic"))
    if found != file.xxh3_128:
        raise CheckpointError(f"{FILE}: xxh3_128 {found} of its content, it says {file.xxh3_128} (changed)")
    return file.prints


def write_prints(ops: Ops, directory: Path, prints: Prints) -> None:
    """Whole or not at all. May come before or after the commit."""
    replace_file(ops, directory, FILE, encode_prints(prints))


def read_prints(directory: Path) -> Prints | None:
    """None where none were stored. Raises NotWhole where they cannot be used: remove the file to go without."""
    try:
        fd = os.open(directory / FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise NotWhole(directory.name, (f"{FILE}: cannot be read ({e.strerror})",)) from e
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise NotWhole(directory.name, (f"{FILE}: not a regular file (refused)",))
        raw = file.read(MAX_BYTES)
    try:
        return decode_prints(raw)
    except CheckpointError as e:
        raise NotWhole(directory.name, (str(e),)) from e


def differing(saved: Mapping[str, TensorPrint], found: Mapping[str, TensorPrint]) -> tuple[str, ...]:
    """The tensors that are not the same in both, a sentence each, in the order of names. Pure.

    A tensor that both have in different dtypes is passed over, with its optimizer state: it was converted on
    purpose, and its bits say nothing.
    """
    converted = {name for name, one in saved.items() if name in found and found[name].dtype != one.dtype}
    said = []
    for name in sorted(saved.keys() | found.keys()):
        if name.partition(":")[0] in converted or name in converted:
            continue
        if words := _difference(saved.get(name), found.get(name)):
            said.append(f"{name}: {words}")
    return tuple(said)


def _difference(saved: TensorPrint | None, found: TensorPrint | None) -> str:
    if found is None:
        return "was saved, is not here"
    if saved is None:
        return "is here, was not saved"
    if saved.shape != found.shape:
        return f"shape {list(found.shape)}, saved with {list(saved.shape)}"
    if saved.fingerprint != found.fingerprint:
        return f"fingerprint {found.fingerprint}, saved with {saved.fingerprint}"
    return ""
