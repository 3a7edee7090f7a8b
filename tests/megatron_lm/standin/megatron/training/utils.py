"""Printing on the ranks that Megatron-LM prints on."""

from datetime import datetime

import torch


def print_rank_0(message):
    if torch.distributed.get_rank() == 0:
        print(message, flush=True)  # noqa: T201


def print_rank_last(message):
    if is_last_rank():
        print(message, flush=True)  # noqa: T201


def is_last_rank():
    return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1


def now():
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")  # noqa: DTZ005
