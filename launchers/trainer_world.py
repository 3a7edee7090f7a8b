"""The ranks: on which device, over which backend, in which groups.

The one place that chooses between CPU with gloo and GPU with nccl. Importing it opens nothing: groups and devices come
with `join`, so a process that has imported everything may be forked into ranks.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state  # type: ignore[import-untyped]
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # type: ignore[import-untyped]
from torch._C._distributed_c10d import TCPStore

from outlast.launchers.megatron_cpu import cuda_here
from outlast.launchers.trainer_args import Settings
from outlast.launchers.trainer_env import RankEnv


@dataclass(frozen=True, kw_only=True)
class World:
    """This rank's coordinates. Megatron's order is tp-cp-ep-dp-pp: the last rank is in the last pipeline stage."""

    env: RankEnv
    device: torch.device
    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    dp: int
    dp_rank: int
    ep: int
    dp_group: Any

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @property
    def speaks_for_replica(self) -> bool:
        """One rank of each data-parallel replica: the one that logs what the replica read."""
        return self.tp_rank == 0 and self.is_last_stage


def join(env: RankEnv, settings: Settings) -> World:
    """Meet the other ranks and cut them into groups. Blocks until all have come, `timeout_s` at most."""
    device, backend = _choose_device(env)
    _rendezvous(env, backend, settings.timeout_s)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=settings.tp,
        pipeline_model_parallel_size=settings.pp,
        virtual_pipeline_model_parallel_size=settings.vpp if settings.vpp > 1 else None,
        context_parallel_size=settings.cp,
        expert_model_parallel_size=settings.ep,
        # with tp > 1 gloo refuses the uneven gather of experts that are split over tp
        expert_tensor_parallel_size=1 if settings.experts else None,
        # nothing here asks for Megatron's second set of gloo groups, which costs start-up time
        create_gloo_process_groups=False,
    )
    seed_generators(settings.seed)
    return World(
        env=env,
        device=device,
        tp=settings.tp,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp=settings.pp,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp=parallel_state.get_data_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        ep=settings.ep,
        dp_group=parallel_state.get_data_parallel_group(),
    )


def seed_generators(seed: int) -> None:
    """Seed this rank's generators; those for split tensors differ by tp and ep rank."""
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def leave() -> None:
    """Say goodbye together, so that nobody loses a peer in mid-collective."""
    dist.barrier()
    dist.destroy_process_group()
    parallel_state.destroy_model_parallel()


def _choose_device(env: RankEnv) -> tuple[torch.device, str]:
    if cuda_here():
        torch.cuda.set_device(env.local_rank)
        return torch.device("cuda", env.local_rank), "nccl"
    # Ranks share the cores; one compute thread each also keeps sums in one order, hence runs bit-identical.
    torch.set_num_threads(1)
    return torch.device("cpu"), "gloo"


def _rendezvous(env: RankEnv, backend: str, timeout_s: float) -> None:
    timeout = timedelta(seconds=timeout_s)
    if env.agent_store or not _is_loopback(env.master_addr):
        dist.init_process_group(
            backend, init_method="env://", rank=env.rank, world_size=env.world_size, timeout=timeout
        )
        return
    # All ranks are on this machine: keep the store and gloo's pairs off every other interface.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = _loopback_store(env, timeout)
    dist.init_process_group(backend, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout)


def _loopback_store(env: RankEnv, timeout: timedelta) -> TCPStore:
    """torch's own store listens on all interfaces; handed a bound socket, it listens there."""
    if env.rank:
        return TCPStore(env.master_addr, env.master_port, env.world_size, is_master=False, timeout=timeout)
    listener = socket.create_server((env.master_addr, env.master_port))
    return TCPStore(
        env.master_addr,
        listener.getsockname()[1],
        env.world_size,
        is_master=True,
        timeout=timeout,
        master_listen_fd=listener.detach(),
        wait_for_workers=False,
    )


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
