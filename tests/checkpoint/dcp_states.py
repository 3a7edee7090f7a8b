"""Small models in each of PyTorch's ways to train them over ranks, for saves of ours and loads without us.

python -P dcp_states.py KIND PATH RANKS    load with plain DCP in forked ranks, print {tensor: sha256 of the whole} of
                                           each, one a line; outlast and megatron are never imported
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # asked for by the first optimizer: once here, and not in every rank
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

KINDS = ("fsdp2", "hsdp", "ddp", "tp_dp", "fsdp2_tp")
IN, HIDDEN, OUT = 7, 12, 3
"""Uneven over 2 and over 4 ranks, and OUT leaves one of 4 without a part."""


@dataclass
class Trainee:
    kind: str
    model: Any
    optimizer: torch.optim.Optimizer
    steps: int = 0

    def train(self, steps: int = 3) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, IN)).square().sum().backward()
            self.optimizer.step()
            self.steps += 1

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "steps": self.steps,
            "notes": {"kind": "test", "list": [1, "a"]},
        }

    def take(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.steps = state["steps"]


def make_trainee(kind: str, seed: int) -> Trainee:
    torch.manual_seed(seed)
    model: Any = torch.nn.Sequential(torch.nn.Linear(IN, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, OUT))
    ranks = dist.get_world_size()
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif kind in ("fsdp2", "hsdp"):
        names = ("replicate", "shard")
        mesh = init_device_mesh(
            "cpu",
            (ranks // 2, 2) if kind == "hsdp" else (ranks,),
            mesh_dim_names=names[-1:] if kind == "fsdp2" else names,
        )
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    else:
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        ways = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], ways)
        if kind == "fsdp2_tp":
            for layer in (model[0], model[2], model):
                fully_shard(layer, mesh=mesh["dp"])
    return Trainee(kind, model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def digest(state: dict[str, Any]) -> dict[str, str]:
    """Every tensor's whole content, and every other value. Collective."""
    flat, _ = torch.distributed.checkpoint._nested_dict.flatten_state_dict(state)
    return {name: _digest_one(value) for name, value in sorted(flat.items())}


def _digest_one(value: Any) -> str:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        content = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype}{list(value.shape)} {hashlib.sha256(content).hexdigest()}"
    return repr(value)


def main(kind: str, path: str, ranks: str) -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(int(ranks)):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    where = f"file://{folder}/store"
                    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=int(ranks))
                    load(kind, path)
                    code = 0
                finally:
                    os._exit(code)
            pids.append(pid)
        return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


def load(kind: str, path: str) -> None:
    trainee = make_trainee(kind, seed=99)
    trainee.train(1)  # moments are there, and others
    state = trainee.state()
    dcp.load(state, checkpoint_id=path)
    trainee.take(state)
    found = digest(trainee.state())
    assert not {"outlast", "megatron"} & sys.modules.keys()
    os.write(1, f"{json.dumps(found)}\n".encode())
    dist.barrier()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
