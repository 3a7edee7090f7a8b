"""What an agent hears of its node's GPUs: from the driver's library, and from an exporter's page if the run names one.

Both tell the same signals. Which of them are worth a line of the log is gpu_tell.py's; what they mean is judged by the
supervisor. The run has to have GPUs for the library to be asked: a node without them is not blind, it has none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from outlast.monitors.exporter import ExporterWatch, url_of
from outlast.monitors.gpu_tell import GpuTeller
from outlast.monitors.nvml import GpuWatch
from outlast.reliability.model import Node, Signal
from outlast.reliability.runfile import RunFile


def sources(run: RunFile, node: Node, helpers: set[int]) -> list[AsyncIterator[Signal]]:
    """What there is to listen to. `helpers` holds the pids of the processes that are ours and no ranks."""
    found: list[AsyncIterator[Signal]] = []
    if run.cluster.gpus_per_node:
        found.append(GpuWatch(node, began=helpers.add, over=helpers.discard).signals())
    if url := url_of(run.cluster.exporter, node):
        found.append(ExporterWatch(node, url).signals())
    return found


async def pass_on(source: AsyncIterator[Signal], hear: Callable[[Signal], None]) -> None:
    """Until the source ends or this is cancelled."""
    teller = GpuTeller()
    async for found in source:
        if (worth := teller.pick(found)) is not None:
            hear(worth)
