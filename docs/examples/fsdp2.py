"""A plain PyTorch run: FSDP2 and AdamW, saved by outlast's Saver, restored on any number of ranks. No Megatron in it.

Run by `outlast run docs/examples/fsdp2.yaml`, or, without outlast around it, by
`torchrun --nproc-per-node 2 docs/examples/fsdp2.py`. Replace make_model() and batch(); the rest is what a script of
your own needs.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from outlast.checkpoint.dcp_restore import restore
from outlast.checkpoint.writer import Saver
from outlast.launchers import recorder

TRAIN_STEPS, SAVE_EVERY, BATCH = 300, 50, 16
ROOT = Path(os.environ.get("OUTLAST_RUN_DIR", "."), "checkpoints")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_model() -> torch.nn.Module:
    torch.manual_seed(1)
    layers = [
        torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(2)
    ]
    model = torch.nn.Sequential(*layers).to(DEVICE)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model


def batch(train_step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the samples of a train_step: the same samples on any number of ranks."""
    generator = torch.Generator().manual_seed(train_step)
    x = torch.randn(BATCH, 64, generator=generator)
    share = slice(dist.get_rank(), None, dist.get_world_size())
    return x[share].to(DEVICE), x.roll(1, dims=1)[share].to(DEVICE)


class Everything:
    """What is saved: asked when a save or a restore wants it, told when it was restored."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.train_step = model, optimizer, 0

    def state_dict(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "train_step": self.train_step}

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.train_step = state["train_step"]


def main() -> None:
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    note = recorder.current()
    note.phase("init")
    model = make_model()
    everything = Everything(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    if path := os.environ.get("OUTLAST_RESTORE_DIR"):
        note.phase("load")
        restore({"run": everything}, path)  # raises where a file or a tensor is not what was saved

    saver = Saver(ROOT, on_durable=lambda train_step, hold_s, durable_s: note.checkpoint_durable(train_step))
    note.phase("train")
    for step in range(everything.train_step + 1, TRAIN_STEPS + 1):
        note.step_started(step)
        x, y = batch(step)
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        everything.optimizer.step()
        everything.optimizer.zero_grad()
        everything.train_step = step
        saver.poll()
        stop = asked_to_stop()
        due = stop or step % SAVE_EVERY == 0 or step == TRAIN_STEPS
        samples = {"samples_from": (step - 1) * BATCH, "samples_to": step * BATCH}
        note.step_done(step, loss=average(loss), **samples, closed=not due)  # told first: no save of an unknown step
        if due:
            note.phase("save")
            note.step_closed(saver.save({"run": everything}, train_step=step, samples=step * BATCH))
            note.phase("train")
        if stop:
            break
    saver.finish()
    saver.close()
    dist.destroy_process_group()


def average(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def asked_to_stop() -> bool:
    """`outlast stop` makes a file; one rank looks, all ranks hear."""
    seen = dist.get_rank() == 0 and os.path.exists(os.environ.get("OUTLAST_STOP_FILE", ""))
    flag = torch.tensor([int(seen)], device=DEVICE)
    dist.all_reduce(flag)
    return bool(flag.item())


if __name__ == "__main__":
    main()
