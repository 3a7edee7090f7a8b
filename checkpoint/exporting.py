"""A checkpoint's model as files that other programs read: safetensors, or one file of torch.save.

    iter_0000030/*.distcp -> model.safetensors                              up to shard_bytes
                             model-00001-of-00003.safetensors ... + model.safetensors.index.json   beyond

Names are those of Megatron's modules (`decoder.layers.0.mlp.linear_fc1.weight`), values and dtypes as stored; no
conversion to another framework's names. Each tensor that the save has a fingerprint of is checked against it on the
way out, so that what leaves is what was trained. A file appears whole or not at all, and none is overwritten.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import psutil
import torch

from outlast.checkpoint.errors import CheckpointError, NotWhole
from outlast.checkpoint.fingerprint import SCHEME, part_of, whole
from outlast.checkpoint.prints import Prints, TensorPrint, read_prints
from outlast.checkpoint.raw_bits import raw_bits
from outlast.checkpoint.tensors import Tensors, is_optimizer, unstack
from outlast.reliability.model import Noun

SHARD_BYTES: Final = 5 << 30
_STATE: Final = "optimizer.state."
_FUSED_NORMS: Final = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


class Exported(Noun, frozen=True, kw_only=True):
    files: tuple[str, ...]
    tensors: int
    size_bytes: int
    checked: int
    """Tensors that have a fingerprint and fit it."""


OnTensor = Callable[[str], None]


def list_model(tensors: Tensors, *, optimizer: bool) -> tuple[str, ...]:
    """The stored names that an export holds."""
    return tuple(name for name in tensors.tensors if optimizer or not is_optimizer(name))


def export_safetensors(
    tensors: Tensors, output: Path, *, optimizer: bool = False, shard_bytes: int = SHARD_BYTES, on_tensor: OnTensor
) -> Exported:
    """Into the directory `output`. One file's tensors are in memory at a time."""
    try:
        from safetensors.torch import save_file
    except ImportError as e:
        raise CheckpointError(f"safetensors cannot be imported ({e}): pip install 'outlast[export]'") from e
    groups = _group(tensors, list_model(tensors, optimizer=optimizer), shard_bytes)
    files = _file_names(len(groups))
    _refuse_existing(output / name for name in (*files, "model.safetensors.index.json"))
    output.mkdir(parents=True, exist_ok=True)
    out = _Outgoing(tensors)
    weight_map: dict[str, str] = {}
    for file, group in zip(files, groups, strict=True):
        content = {name: tensor for stored in group for name, tensor in out.take(stored, on_tensor)}
        weight_map.update(dict.fromkeys(content, file))
        facts = {"format": "pt", "train_step": str(tensors.manifest.train_step)}
        _place(output / file, lambda path, content=content, facts=facts: save_file(content, path, metadata=facts))  # type: ignore[misc]
    if len(files) > 1:
        index = {"metadata": {"total_size": out.size_bytes}, "weight_map": weight_map}
        raw = msgspec.json.format(msgspec.json.encode(index), indent=2)
        _place(output / "model.safetensors.index.json", lambda path: Path(path).write_bytes(raw))
        files = (*files, "model.safetensors.index.json")
    return out.summary(files)


def export_torch(tensors: Tensors, output: Path, *, optimizer: bool = False, on_tensor: OnTensor) -> Exported:
    """As one file that torch.load(weights_only=True) reads: {name: tensor}. All of it is in memory at once."""
    names = list_model(tensors, optimizer=optimizer)
    needed, free = sum(_stored_bytes(tensors, name) for name in names), psutil.virtual_memory().available
    if needed > free:
        raise CheckpointError(
            f"torch.save needs all {needed / 1e9:.1f} GB in memory, {free / 1e9:.1f} GB are free: export safetensors"
        )
    _refuse_existing([output])
    out = _Outgoing(tensors)
    content = {name: tensor for stored in names for name, tensor in out.take(stored, on_tensor)}
    output.parent.mkdir(parents=True, exist_ok=True)
    _place(output, lambda path: torch.save(content, path))
    return out.summary((output.name,))


class _Outgoing:
    """Reads stored tensors, checks them against the fingerprints of the save, counts."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        prints = read_prints(tensors.directory)
        self._prints: Prints | None = prints if prints is not None and prints.scheme == SCHEME else None
        self.size_bytes = self._count = self._checked = 0

    def take(self, stored: str, on_tensor: OnTensor) -> Iterator[tuple[str, torch.Tensor]]:
        for name, part in unstack(stored, self._tensors.read(stored)):
            tensor = part.clone(memory_format=torch.contiguous_format)
            self._check(name, tensor)
            self._count += 1
            self.size_bytes += tensor.nbytes
            yield name, tensor
        on_tensor(stored)

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        prints = self._prints.tensors if self._prints else {}
        label = next((label for label in print_labels(name) if label in prints), "")
        known = prints.get(label)
        if known is None or known.dtype != str(tensor.dtype).removeprefix("torch."):
            return
        if not fits(tensor, known):
            raise NotWhole(
                self._tensors.directory.name,
                (f"{name}: not as it was saved (its fingerprint is another); its files are as they were written",),
            )
        self._checked += 1

    def summary(self, files: Sequence[str]) -> Exported:
        return Exported(files=tuple(files), tensors=self._count, size_bytes=self.size_bytes, checked=self._checked)


def print_labels(name: str) -> tuple[str, ...]:
    """What an exported tensor's fingerprint may be called: optimizer.state.exp_avg.W is W:exp_avg.

    A layer's norms are stored under the names that Transformer Engine's fused modules have, whichever were trained.
    """
    kind, parameter = "", name
    if name.startswith(_STATE):
        kind, _, parameter = name.removeprefix(_STATE).partition(".")
    plain = parameter
    for fused, norm in _FUSED_NORMS.items():
        plain = plain.replace(fused, norm)
    # the main parameter of an fp32 weight is the weight
    suffixes = {"": ("",), "param": (":main", "")}.get(kind, (f":{kind}",))
    return tuple(f"{one}{suffix}" for suffix in suffixes for one in (parameter, plain))


def fits(tensor: torch.Tensor, known: TensorPrint) -> bool:
    """Whether a stored tensor has this fingerprint; rows beyond its shape are the vocabulary's padding."""
    if tensor.dim() and known.shape and tensor.shape[0] > known.shape[0]:
        tensor = tensor[: known.shape[0]]
    if tuple(tensor.shape) != known.shape:
        return False
    part = part_of(raw_bits(tensor.reshape(-1)), whole(known.shape))
    return f"{part.total:016x}" == known.fingerprint


# ---------------------------------------------------------------- files


def _group(tensors: Tensors, names: Sequence[str], shard_bytes: int) -> list[list[str]]:
    """Stored tensors in files of at most shard_bytes, but for a tensor that is larger alone."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name in names:
        size_bytes = _stored_bytes(tensors, name)
        if groups[-1] and filled + size_bytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size_bytes
    return groups


def _stored_bytes(tensors: Tensors, name: str) -> int:
    one = tensors.tensors[name]
    return torch.Size(one.shape).numel() * one.dtype.itemsize


def _file_names(count: int) -> tuple[str, ...]:
    if count == 1:
        return ("model.safetensors",)
    return tuple(f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1))


def _refuse_existing(paths: Iterator[Path] | Sequence[Path]) -> None:
    for path in paths:
        if os.path.lexists(path):
            raise CheckpointError(f"{path}: is there already; nothing is overwritten", path=str(path))


def _place(path: Path, write: Callable[[str], object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(str(temporary))
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
