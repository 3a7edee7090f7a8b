"""The CPU adaptation: honest about there being no GPU, told apart from callers outside Megatron."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

CHECKS = """
import os
from outlast.launchers import trainer
trainer.preload()
import torch
from outlast.launchers import megatron_cpu

assert megatron_cpu.cuda_here() is torch.cuda.is_available() is False
assert megatron_cpu.adapt() is True, "twice is once"
assert len(os.listdir("/proc/self/task")) == 1, "a thread would not survive the fork"

assert torch.cuda.is_available() is False, "it says what is true"
assert torch.zeros(2, device="cuda").device.type == "cpu"
assert torch.tensor([1.0], device=torch.device("cuda", 0)).cuda().device.type == "cpu"
assert torch.zeros(1).type() == "torch.FloatTensor"
inside = {"__name__": "megatron.core.optimizer.x", "torch": torch}
assert eval("torch.zeros(1).type()", inside) == "torch.cuda.FloatTensor"
assert eval("torch.zeros(1).type(torch.float64)", inside).dtype == torch.float64

from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
tracker = CudaRNGStatesTracker()
tracker.add("a", 1)
torch.manual_seed(5)
before = torch.rand(2)
torch.manual_seed(5)
with tracker.fork("a"):
    first = torch.rand(2)
    tracker.add("b", 2)
    with tracker.fork("b"):
        torch.rand(7)
    second = torch.rand(2)
assert torch.equal(torch.rand(2), before), "the outer generator stood still"
torch.manual_seed(1)
assert torch.equal(torch.cat([first, second]), torch.rand(4)), "the inner one goes on where it was"
print("all hold")
"""


def test_in_a_process_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", CHECKS], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all hold\n"


GPU = """
import torch
from outlast.launchers import megatron_cpu
made = torch.zeros
megatron_cpu.cuda_here = lambda: True
assert megatron_cpu.adapt() is False
assert torch.zeros is made and torch.cuda.current_device.__module__ == "torch.cuda"
print("untouched")
"""


def test_where_cuda_is_available_nothing_is_touched() -> None:
    done = subprocess.run([sys.executable, "-c", GPU], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "untouched\n", done.stderr
