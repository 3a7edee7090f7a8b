"""Who this rank is: the environment, as torchrun sets it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outlast.launchers.trainer_args import TrainerError


@dataclass(frozen=True, kw_only=True)
class RankEnv:
    """What torchrun tells each rank."""

    rank: int
    local_rank: int
    world_size: int
    master_addr: str
    master_port: int
    attempt: int = 0
    agent_store: bool = False
    """torchrun's agent already holds the store at the master's address."""

    @property
    def is_last(self) -> bool:
        return self.rank == self.world_size - 1


def read_rank_env(env: Mapping[str, str]) -> RankEnv:
    """The rank's place; a single rank needs only a port, and not even that."""
    world_size = _number(env, "WORLD_SIZE", "1")
    alone = world_size == 1
    rank = _number(env, "RANK", "0" if alone else None)
    return RankEnv(
        rank=rank,
        local_rank=_number(env, "LOCAL_RANK", str(rank)),
        world_size=world_size,
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(env, "MASTER_PORT", "0" if alone else None),
        attempt=_number(env, "OUTLAST_ATTEMPT", env.get("TORCHELASTIC_RESTART_COUNT", "0")),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _number(env: Mapping[str, str], name: str, default: str | None) -> int:
    text = env.get(name, default)
    if text is None or not text.isdecimal():
        raise TrainerError(f"environment {name} is {text!r}: expected a number, as torchrun sets it")
    return int(text)
