"""An agent whose supervisor speaks JSON lines on stdin and stdout: the real agent, without the network.

Run as `python agent_host.py RUN_DIR NODE`. Prints FromAgent messages; signals are wrapped in Heard.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from outlast.launchers.agent import Agent, become_agent, end_on_signals
from outlast.launchers.keeper import Keeper
from outlast.launchers.logs import Pump
from outlast.launchers.nest import Nest
from outlast.reliability.model import Node, Signal
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import RunFile
from outlast.reliability.wire import FromAgent, FromSupervisor, Heard

_decode = msgspec.json.Decoder(FromSupervisor)


class Stdout:
    """The link's place."""

    def __init__(self) -> None:
        self._number = 0

    def hear(self, signal: Signal) -> None:
        self._number += 1
        self.send(Heard(number=self._number, signal=signal))

    def send(self, message: FromAgent) -> None:
        os.write(1, msgspec.json.encode(message) + b"\n")


async def host(run_dir: RunDir, run: RunFile, node: Node) -> int:
    become_agent(node, run_dir)
    nest, pump, post = Nest(run_dir.root, node), Pump(), Stdout()
    keeper = Keeper(run, run_dir, node, nest, pump, modules=run.task.preload, hear=post.hear)
    agent = Agent(run_dir, run, node, keeper, hear=post.hear)
    end_on_signals(agent)

    async def carry_out(message: Any) -> None:
        post.send(await agent.handle(message, post.send))

    async def listen() -> None:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            agent.begin(carry_out(_decode.decode(line)))
        agent.end(3, "the test has ended")

    async def beat() -> None:
        while True:
            post.send(agent.beat((0, 0)))
            await asyncio.sleep(0.1)

    code = await agent.work(listen(), beat())
    pump.close(2.0)
    nest.close()
    return code


if __name__ == "__main__":
    root = RunDir(root=Path(sys.argv[1]))
    run_file = msgspec.json.decode(root.run_file.read_bytes(), type=RunFile)
    sys.exit(asyncio.run(host(root, run_file, Node(sys.argv[2]))))
