"""Fingerprints of a Megatron model and its optimizer as somebody else's program has them: whichever kind they are.

    live_prints.py    bare chunks, DistributedOptimizer, the vocabulary known: the reference trainer
    here              also Megatron's plain optimizers (FP32, Float16), wrapped chunks, a vocabulary that is not known,
                      a restore of the weights alone

What cannot be placed for certain is left out by name: a number that is wrong would refuse a good checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch

from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.fingerprint import whole
from outlast.checkpoint.live_prints import Held, LivePrints
from outlast.checkpoint.placing import Piece, Placed
from outlast.checkpoint.prints import Prints

PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")


class ModelPrints(LivePrints):
    """The fingerprints of one training process group. `take` and `check` are collective."""

    def __init__(self, model: Any, optimizer: Any, *, vocabulary: int | None, padded: int | None) -> None:
        """vocabulary: without its padding, where that is known; padded: with it, None where there is none."""
        chunks = [unwrap(chunk) for chunk in (model if isinstance(model, Sequence) else [model])]
        super().__init__(chunks, optimizer, vocabulary=vocabulary)
        self.with_state = True
        if vocabulary is None and padded is not None:
            self._leave_out(PADDED, "how many of its rows are padding is not known")

    def check(self, saved: Prints, where: str) -> int:
        """As LivePrints.check; the optimizer's state only where it was saved and is wanted (`with_state`)."""
        before, stored = self.with_state, any(":" in label for label in saved.tensors)
        self.with_state = before and stored
        if not self.with_state:
            weights = {label: one for label, one in saved.tensors.items() if ":" not in label}
            saved = msgspec.structs.replace(saved, tensors=weights)
        try:
            return super().check(saved, where)
        finally:
            self.with_state = before

    def look(self) -> int:
        """How many tensors this rank holds a part of. Not collective; raises what makes counting impossible."""
        return len(self._held())

    def _leave_out(self, names: Sequence[str], why: str) -> None:
        gone = [parameter for parameter, placed in self._placed.items() if placed.name in names]
        self._left_out |= {self._placed[parameter].name: why for parameter in gone}
        self._placed = {parameter: placed for parameter, placed in self._placed.items() if parameter not in set(gone)}

    def _held(self) -> list[Held]:
        held = [one for one in super()._held() if self.with_state or ":" not in one.label]
        if self.with_state:
            for optimizer in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
                held += _held_plainly(optimizer, self._placed)
        return held


def unwrap(chunk: Any) -> Any:
    """The model itself, out of what makes it data parallel or keeps it in 16 bits."""
    while isinstance(getattr(chunk, "module", None), torch.nn.Module):
        chunk = chunk.module
    if any(hasattr(parameter, "placements") for parameter in chunk.parameters()):
        raise CheckpointError("its parameters are DTensors")
    return chunk


def _held_plainly(optimizer: Any, placed: Mapping[torch.nn.Parameter, Placed]) -> Iterator[Held]:
    """The state of an optimizer that has all of each parameter on every data-parallel rank."""
    inner = getattr(optimizer, "optimizer", None)
    if inner is None or hasattr(optimizer, "model_param_group_index_map"):
        return
    for parameter, main in _pair(optimizer, inner):
        if (place := placed.get(parameter)) is None:
            continue
        state = dict(inner.state.get(main, {})) | ({"main": main} if main is not parameter else {})
        for key, tensor in state.items():
            if not torch.is_tensor(tensor):
                continue
            label = f"{place.name}:{key}"
            if tensor.shape == parameter.shape:
                yield _hold(label, place, tensor)
            elif tensor.numel() == 1:
                first = place.speaks and place.copy == 0 and not any(place.pieces[0].block.offset)
                scalar = replace(place, shape=(), pieces=(Piece(0, whole(())),))
                yield Held(label=label, placed=scalar, tensor=tensor.detach(), begin=0, counted=(0, int(first)))


def _pair(optimizer: Any, inner: Any) -> Iterator[tuple[Any, Any]]:
    """(the model's parameter, what the optimizer steps)."""
    mains: dict[int, Any] = {}
    for models, copies in zip(
        getattr(optimizer, "float16_groups", ()), getattr(optimizer, "fp32_from_float16_groups", ()), strict=False
    ):
        mains |= {id(copy): parameter for parameter, copy in zip(models, copies, strict=True)}
    for group in inner.param_groups:
        for main in group["params"]:
            yield mains.get(id(main), main), main


def _hold(label: str, place: Placed, tensor: torch.Tensor) -> Held:
    """Data-parallel copies share the work out, as they do for weights."""
    size = tensor.numel()
    share = (size * place.copy // place.copies, size * (place.copy + 1) // place.copies)
    counted = share if place.speaks else (0, 0)
    return Held(label=label, placed=place, tensor=tensor.detach(), begin=0, counted=counted)
