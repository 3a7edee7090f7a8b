"""Which samples a train_step sees: a pure function of (seed, samples consumed), whatever the layout. Pure.

The run reads one endless stream of ordinals 0, 1, 2, ... Each pass over the corpus (an epoch) is its own permutation,
computed place by place, so that no shuffled list is stored, saved or rebuilt after a restart:

    ordinal --divmod(samples)--> epoch, place --keyed permutation--> sample

A global batch is the next `global_batch` ordinals. Inside it ranks take theirs microbatch-major, then by data-parallel
rank; so the set is the same for any number of ranks, and the order is the same for any pp and tp.
"""

from __future__ import annotations

from typing import Final

_ROUNDS: Final = 4
"""Luby and Rackoff 1988: four Feistel rounds give a permutation that looks random from both sides."""
_MASK64: Final = (1 << 64) - 1


def sample_at(ordinal: int, *, seed: int, samples: int) -> int:
    """The sample, 0 .. samples-1, at this place of the stream. Each epoch holds every sample once."""
    if ordinal < 0 or samples < 1:
        raise ValueError(f"ordinal {ordinal} of {samples} samples: expected ordinal >= 0 and at least one sample")
    epoch, place = divmod(ordinal, samples)
    half_bits = max(1, ((samples - 1).bit_length() + 1) // 2)
    key = _mix(_mix(seed & _MASK64) ^ epoch)
    # Cycle walking: the Feistel network permutes a power of four that holds `samples`; stepping on until the value is
    # a sample again stays a permutation, and takes four steps at most on average.
    while True:
        place = _feistel(place, half_bits, key)
        if place < samples:
            return place


def rank_ordinals(consumed: int, *, microbatch: int, micro_batch: int, dp: int, dp_rank: int) -> range:
    """The ordinals that this data-parallel rank reads for one microbatch of the step that begins at `consumed`."""
    first = consumed + (microbatch * dp + dp_rank) * micro_batch
    return range(first, first + micro_batch)


def microbatches(*, global_batch: int, micro_batch: int, dp: int) -> int:
    """How many microbatches each rank does a step; ValueError where the batch does not divide."""
    count, rest = divmod(global_batch, micro_batch * dp)
    if rest or count < 1:
        raise ValueError(
            f"global batch {global_batch} is not a multiple of micro batch {micro_batch} x dp {dp}: "
            f"choose --micro-batch so that it divides {global_batch} / {dp}"
        )
    return count


def _feistel(value: int, half_bits: int, key: int) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (_mix(key ^ (turn << 56) ^ right) & mask)
    return (left << half_bits) | right


def _mix(value: int) -> int:
    """splitmix64's finaliser (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
