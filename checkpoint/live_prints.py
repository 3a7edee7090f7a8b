"""Fingerprints of a live training state: weights, main parameters, moments, by parameter name, over all ranks.

    at a save        each element is counted once: data-parallel copies share the work out among themselves; a thread
                     counts beside the forward and backward passes, as long as the state does not change
    after a restore  everything that any rank holds is counted: n copies must give n times the saved number, so one
                     wrong copy anywhere is seen, in any layout

Parts are 64-bit sums, so one all-reduce of two numbers a tensor adds them up over any number of ranks. Reads only;
which tensors there are comes from placing.py and the optimizer's own bookkeeping, never from the checkpoint's.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from outlast.checkpoint.errors import CheckpointError, NotWhole
from outlast.checkpoint.fingerprint import SCHEME, Part, part_of, whole
from outlast.checkpoint.placing import Piece, Placed, overlaps, place_parameters, read_ranks
from outlast.checkpoint.prints import NotAsSaved, Prints, TensorPrint, differing, read_prints
from outlast.checkpoint.raw_bits import raw_bits

log = logging.getLogger(__name__)

_MODULUS: Final = 1 << 64


@dataclass(frozen=True, kw_only=True)
class Held:
    """A stretch of a logical tensor that this rank holds."""

    label: str
    """The parameter's name; `name:exp_avg` for its optimizer state."""
    placed: Placed
    tensor: torch.Tensor
    """Elements [begin, begin + numel) of this rank's parameter, or of something with its shape."""
    begin: int
    counted: tuple[int, int]
    """Which elements of `tensor` this rank counts at a save, so that each is counted once over all ranks."""


@dataclass(frozen=True, kw_only=True)
class _Kind:
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Counted:
    """What this rank adds to the number of one tensor."""

    kind: _Kind
    part: Part


class Counting:
    """A count of what this rank holds, made by a thread of its own."""

    def __init__(self, train_step: int, held: Sequence[Held]) -> None:
        self.train_step = train_step
        self._own: dict[str, Counted] = {}
        self._error: Exception | None = None

        def run() -> None:
            try:
                self._own = _sum_up(held, lambda one: _count(one, *one.counted))
            except Exception as e:  # noqa: BLE001 -- raised where it is waited for
                self._error = e

        self._thread = threading.Thread(target=run, name="prints", daemon=True)
        self._thread.start()

    def wait(self) -> Mapping[str, Counted]:
        """The state may change when it returns."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._own


class LivePrints:
    """The fingerprints of one training process group. `take`, `finish` and `check` are collective."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizer: Any,
        *,
        vocabulary: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """chunks: the bare model chunks of this rank. process_group: all ranks; None: the default one."""
        self.compared = 0
        """Tensors that the last check found as they were saved."""
        self._optimizer = optimizer
        self._group = process_group
        self._placed, left_out = place_parameters(chunks, read_ranks(), vocabulary=vocabulary)
        self._left_out = dict(left_out)
        self._mine: frozenset[str] = frozenset()
        self._kinds: dict[str, _Kind] = {}
        """Of all ranks, in an order that all have."""
        backend = dist.get_backend(process_group)
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")

    def take(self, train_step: int) -> Prints:
        """The state as it is now."""
        return self.finish(self.begin(train_step))

    def begin(self, train_step: int) -> Counting:
        """Count what this rank holds in a thread. Not collective. The state must not change before it has ended."""
        return Counting(train_step, self._held())

    def finish(self, counting: Counting) -> Prints:
        """Wait for the thread, and add up over all ranks."""
        train_step = counting.train_step
        sums = self._add_up(counting.wait())
        tensors: dict[str, TensorPrint] = {}
        left_out = dict(self._left_out)
        for label, kind in self._kinds.items():
            part = sums[label]
            if part.elements != kind.elements:
                left_out[label] = f"its parts over all ranks have {part.elements:,} elements of {kind.elements:,}"
                log.warning("no fingerprint of %s: %s", label, left_out[label])
                continue
            tensors[label] = TensorPrint(dtype=kind.dtype, shape=kind.shape, fingerprint=f"{part.total:016x}")
        return Prints(scheme=SCHEME, train_step=train_step, tensors=tensors, left_out=left_out)

    def check(self, saved: Prints, where: str) -> int:
        """Compare with what was saved; how many tensors were compared. Raises NotAsSaved on every rank alike."""
        if saved.scheme != SCHEME:
            log.warning("%s: fingerprints of scheme %s, this version has %s: not compared", where, saved.scheme, SCHEME)
            return 0
        sums = self._add_up(_sum_up(self._held(), lambda one: _count(one, 0, one.tensor.numel())))
        left_out = saved.left_out.keys() | self._left_out.keys()
        wanted = {label: one for label, one in saved.tensors.items() if label not in left_out}
        found: dict[str, TensorPrint] = {}
        problems: list[str] = []
        for label, kind in self._kinds.items():
            if label in left_out:
                continue
            if sums[label].elements % max(kind.elements, 1):
                problems.append(f"{label}: all ranks hold {sums[label].elements:,} elements of {kind.elements:,}")
            found[label] = _as_one(sums[label], kind, wanted.get(label))
        if problems := [*problems, *differing(wanted, found)]:
            raise NotAsSaved(where, tuple(problems), of=len(wanted))
        self.compared = len(wanted)
        return self.compared

    # ------------------------------------------------------------------ what this rank holds

    def _held(self) -> list[Held]:
        held = [_held_weight(parameter, placed) for parameter, placed in self._placed.items()]
        for optimizer in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            if hasattr(optimizer, "model_param_group_index_map"):
                held += _held_state(optimizer, self._placed)
        return held

    # ------------------------------------------------------------------ all ranks together

    def _add_up(self, own: Mapping[str, Counted]) -> dict[str, Part]:
        """The sums over all ranks: one collective, but for the first time and where a rank holds other tensors now."""
        if not self._kinds:
            self._agree(own)
        sums = self._reduce(own)
        if sums is None:  # moments, which come with the first train_step
            self._agree(own)
            sums = self._reduce(own)
        if sums is None:
            raise CheckpointError("fingerprint: the ranks' tensors changed while they were counted")
        return sums

    def _reduce(self, own: Mapping[str, Counted]) -> dict[str, Part] | None:
        """None on all ranks where one has tensors that were not agreed on."""
        rows = {label: row for row, label in enumerate(self._kinds)}
        known = own.keys() == self._mine
        local = np.zeros((len(rows) + 1, 2), np.uint64)
        if known:
            for label, counted in own.items():
                local[rows[label]] = (counted.part.total, counted.part.elements)
        else:
            local[-1, 0] = 1
        # as signed numbers: sums wrap around the same way
        sums = torch.from_numpy(local.view(np.int64)).to(self._device)
        dist.all_reduce(sums, group=self._group)
        total = sums.cpu().numpy().view(np.uint64)
        if total[-1, 0]:
            return None
        return {label: Part(int(total[row, 0]), int(total[row, 1])) for label, row in rows.items()}

    def _agree(self, own: Mapping[str, Counted]) -> None:
        """All ranks learn all tensors of all."""
        kinds = {label: counted.kind for label, counted in own.items()}
        said: list[tuple[dict[str, _Kind], dict[str, str]]] = [({}, {})] * dist.get_world_size(self._group)
        dist.all_gather_object(said, (kinds, self._left_out), group=self._group)
        merged: dict[str, _Kind] = {}
        for rank, (theirs, left_out) in enumerate(said):
            self._left_out |= left_out
            for label, kind in theirs.items():
                if merged.setdefault(label, kind) != kind:
                    raise CheckpointError(f"fingerprint: {label}: rank {rank} has {kind}, another {merged[label]}")
        self._mine, self._kinds = frozenset(kinds), dict(sorted(merged.items()))


def check_after_restore(live: LivePrints, path: Path, process_group: dist.ProcessGroup | None = None) -> int:
    """Compare what a restore of this checkpoint gave with what was saved; how many tensors. Collective.

    0 with a warning where it has no fingerprints. Raises NotAsSaved, or NotWhole where they cannot be used, everywhere.
    """
    said: list[Prints | tuple[str, ...] | None] = [None]
    if dist.get_rank(process_group) == 0:
        try:
            said = [read_prints(path)]
        except NotWhole as e:
            said = [e.problems]
    dist.broadcast_object_list(said, src=0, group=process_group)
    saved = said[0]
    if isinstance(saved, tuple):
        raise NotWhole(path.name, saved)
    if saved is None:
        log.warning("%s has no fingerprints: what was restored is checked by its files alone", path)
        return 0
    return live.check(saved, path.name)


def _held_weight(parameter: torch.nn.Parameter, placed: Placed) -> Held:
    size = parameter.numel()
    share = (size * placed.copy // placed.copies, size * (placed.copy + 1) // placed.copies)
    return Held(
        label=placed.name,
        placed=placed,
        tensor=parameter.detach(),
        begin=0,
        counted=share if placed.speaks else (0, 0),
    )


def _held_state(optimizer: Any, placed: Mapping[torch.nn.Parameter, Placed]) -> Iterator[Held]:
    """This rank's shard of a DistributedOptimizer: a flat range of each parameter in it."""
    get_state: Callable[[Any], Mapping[str, Any]] = optimizer._get_main_param_and_optimizer_states
    for parameter in optimizer.model_param_group_index_map:
        if (place := placed.get(parameter)) is None:
            continue
        own = optimizer._get_model_param_range_map(parameter)["param"]
        for key, tensor in get_state(parameter).items():
            if not torch.is_tensor(tensor) or (key == "param" and _same_storage(tensor, parameter)):
                continue  # in fp32 the main parameter is a view of the weight
            label = f"{place.name}:{'main' if key == 'param' else key}"
            if tensor.numel() == own.size:
                counted = (0, tensor.numel()) if place.state_speaks else (0, 0)
                yield Held(label=label, placed=place, tensor=tensor.detach(), begin=own.start, counted=counted)
            elif tensor.numel() == 1 and own.start == 0:
                yield _held_scalar(label, place, tensor)


def _held_scalar(label: str, place: Placed, tensor: torch.Tensor) -> Held:
    """One number a parameter (AdamW's step): told by the ranks that hold the first element of their part of it."""
    scalar = replace(place, shape=(), pieces=(Piece(0, whole(())),))
    first = place.state_speaks and not any(place.pieces[0].block.offset)
    return Held(label=label, placed=scalar, tensor=tensor.detach(), begin=0, counted=(0, int(first)))


def _same_storage(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _kind(one: Held) -> _Kind:
    return _Kind(dtype=str(one.tensor.dtype).removeprefix("torch."), shape=one.placed.shape)


def _sum_up(held: Sequence[Held], count: Callable[[Held], Part]) -> dict[str, Counted]:
    own: dict[str, Counted] = {}
    for one in held:
        before = own[one.label].part if one.label in own else Part()
        own[one.label] = Counted(_kind(one), before + count(one))
    return own


def _count(one: Held, first: int, last: int) -> Part:
    """Elements [first, last) of the held tensor."""
    if first >= last:
        return Part()
    bits = raw_bits(one.tensor.reshape(-1)[first:last])
    begin = one.begin + first
    done = Part()
    for piece, a, b in overlaps(one.placed, begin, begin + bits.size):
        done += part_of(bits[a:b], piece.block, begin=begin + a - piece.begin)
    return done


def _as_one(part: Part, kind: _Kind, saved: TensorPrint | None) -> TensorPrint:
    """What all copies say together: the saved number where n copies give n times that, else one that is not it."""
    copies = part.elements // max(kind.elements, 1)
    agree = saved is not None and part.total == copies * int(saved.fingerprint, 16) % _MODULUS
    number = saved.fingerprint if saved is not None and agree else f"{part.total:016x}"
    return TensorPrint(dtype=kind.dtype, shape=kind.shape, fingerprint=number)
