"""A torch tensor's raw bits as a numpy array, for fingerprint.py: also of types that numpy has no name for."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from outlast.checkpoint.fingerprint import Bits

_WIDTH: Final = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}


def raw_bits(flat: torch.Tensor) -> Bits:
    """The elements of a flat tensor as unsigned numbers of their own width, on the CPU; no copy where it can be."""
    signed, unsigned = _WIDTH.get(flat.element_size(), (torch.int64, np.uint64))
    bits: Bits = flat.cpu().contiguous().view(signed).numpy().view(unsigned)
    return bits
