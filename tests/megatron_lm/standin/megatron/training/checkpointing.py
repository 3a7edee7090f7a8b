"""Saving and loading in megatron.core's torch_dist format, with Megatron-LM's directories, lines and ends."""

import os
import random
import sys

import numpy
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.rerun_state_machine import get_rerun_state_machine

from . import ft_integration, wandb_utils
from .global_vars import get_args
from .utils import is_last_rank, now, print_rank_0


def get_checkpoint_name(root, iteration):
    return os.path.join(root, f"iter_{iteration:07d}")


def get_checkpoint_tracker_filename(root):
    return os.path.join(root, "latest_checkpointed_iteration.txt")


def _sharded(model, optimizer, rng):
    """Parameters and moments as replicas of each other, one generator state a rank."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    state = {"rng_state": ShardedObject("rng_state", rng, (world,), (rank,))}
    for name, parameter in model.named_parameters():
        moments = optimizer.optimizer.state[parameter]
        for key, tensor in (("w", parameter.data), ("m", moments["exp_avg"]), ("v", moments["exp_avg_sq"])):
            state[f"{key}.{name}"] = ShardedTensor.from_rank_offsets(f"{key}.{name}", tensor, replica_id=rank)
    return state


def save_checkpoint(
    iteration,
    model,
    optimizer,
    opt_param_scheduler,
    num_floating_point_operations_so_far,
    checkpointing_context=None,
    non_persistent_ckpt=False,
    train_data_iterator=None,
):
    args = get_args()
    ft_integration.on_checkpointing_start()
    print_rank_0(f"[{now()}] saving checkpoint at iteration {iteration:7d} to {args.save} in torch_dist format")
    rerun = get_rerun_state_machine().state_dict(data_iterator=train_data_iterator, ckpt_format=args.ckpt_format)
    checkpoint_name = get_checkpoint_name(args.save, iteration)
    rng = [random.getstate(), numpy.random.get_state(), torch.get_rng_state()]
    state = _sharded(model, optimizer, rng)
    state |= {"iteration": iteration, "consumed_train_samples": args.consumed_train_samples}
    state |= {"optimizer_step": optimizer.steps, "world_size": args.world_size}
    if rerun:
        state["rerun_state_machine"] = rerun
    if args.rank == 0:
        os.makedirs(checkpoint_name, exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(state, checkpoint_name)
    torch.distributed.barrier()
    if args.rank == 0:
        with open(get_checkpoint_tracker_filename(args.save), "w") as file:
            file.write(str(iteration))
    print_rank_0(
        f"  [{now()}] successfully saved checkpoint from iteration {iteration:7d} to {args.save} [ t 1/1, p 1/1 ]"
    )
    if is_last_rank():
        tracker = get_checkpoint_tracker_filename(args.save)
        wandb_utils.on_save_checkpoint_success(checkpoint_name, tracker, args.save, iteration)
    torch.distributed.barrier()
    ft_integration.on_checkpointing_end(is_async_finalization=False)


def load_checkpoint(model, optimizer, opt_param_scheduler):
    args = get_args()
    tracker = get_checkpoint_tracker_filename(args.load or "")
    iteration = args.ckpt_step or (int(open(tracker).read()) if os.path.isfile(tracker) else 0)  # noqa: SIM115
    if not iteration or not os.path.isdir(get_checkpoint_name(args.load, iteration)):
        print_rank_0(f"WARNING: could not find the metadata file {tracker}")
        print_rank_0("    will not load any checkpoints and will start from random")
        if args.exit_on_missing_checkpoint:
            print_rank_0(">> '--exit-on-missing-checkpoint' set ... exiting. <<")
            torch.distributed.barrier()
            sys.exit()
        return 0, 0
    print_rank_0(f" loading distributed checkpoint from {args.load} at iteration {iteration}")
    checkpoint_name = get_checkpoint_name(args.load, iteration)
    optimizer.prime()
    wanted = _sharded(model, optimizer, None)
    machine = get_rerun_state_machine()
    common = dist_checkpointing.load_common_state_dict(checkpoint_name)
    asks = common["world_size"] == args.world_size and machine.validate_state_dict(common.get("rerun_state_machine"))
    if asks:
        wanted["rerun_state_machine"] = machine.state_dict(None, args.ckpt_format, force=True)
    state = dist_checkpointing.load(wanted, checkpoint_name)
    for name, parameter in model.named_parameters():
        moments = optimizer.optimizer.state[parameter]
        parameter.data.copy_(state[f"w.{name}"])
        moments["exp_avg"].copy_(state[f"m.{name}"])
        moments["exp_avg_sq"].copy_(state[f"v.{name}"])
        moments["step"].fill_(state["optimizer_step"])
    optimizer.steps = state["optimizer_step"]
    args.iteration, args.consumed_train_samples = state["iteration"], state["consumed_train_samples"]
    if asks:
        machine.load_state_dict(state["rerun_state_machine"])
    random.setstate(state["rng_state"][0])
    numpy.random.set_state(state["rng_state"][1])
    torch.set_rng_state(state["rng_state"][2])
    torch.distributed.barrier()
    print_rank_0(f"  successfully loaded checkpoint from {args.load} [ t 1/1, p 1/1 ] at iteration {iteration}")
    ft_integration.on_checkpoint_loaded(is_local_chkpt=False)
    return iteration, 0
