"""Whether any rank got the signal."""

import signal

import torch


class DistributedSignalHandler:
    def __init__(self, sig=signal.SIGTERM):
        self.sig = sig
        self._signal_received = False

    def signals_received(self):
        mine = torch.tensor([int(self._signal_received)], dtype=torch.int32)
        found = [torch.zeros_like(mine) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(found, mine)
        return [one.item() for one in found]

    def __enter__(self):
        signal.signal(self.sig, self._note)
        return self

    def _note(self, _number, _frame):
        self._signal_received = True
