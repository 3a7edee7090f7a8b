"""`outlast run` with one difference: no rule waits for what may follow a line, so that each line is its own incident.

    bench_supervisor.py RUN.yaml

The real supervisor, agent, link and log, built by the same functions; only the policy's waiting time is 0. When each
verdict was durable is written beside the run directory, `durable.txt`: its line in the log tells only when it was made.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from pathlib import Path

import msgspec

from outlast.reliability.cli import common, compose
from outlast.reliability.config import load_frozen
from outlast.reliability.events import Judged, LogEvent
from outlast.reliability.freeze import freeze
from outlast.reliability.parts import Parts
from outlast.reliability.supervise import supervise
from outlast.reliability.switchboard import Switchboard

DURABLE = Path("durable.txt")


def main(run_file: Path) -> int:
    """Until the run is over or this process is told to end."""
    asked = common.read(run_file).run
    run_dir = freeze(asked, Path(asked.run_root))
    run = load_frozen(run_dir)
    cluster = compose.make_cluster(run_dir, run)

    def tell(event: LogEvent) -> None:
        if isinstance(event.body, Judged):
            with DURABLE.open("a", encoding="utf-8") as file:
                file.write(f"{event.seq} {time.time()}\n")

    def build(board: Switchboard) -> Parts:
        parts = compose.make_parts(run_dir, run, board, cluster, node="", in_batch=False, on_event=tell)
        at_once = msgspec.structs.replace(parts.policy, settle_s=0.0, consequence_s=0.0, quiet_s=0.0)
        return dataclasses.replace(parts, policy=at_once)

    secret = bytes.fromhex(run_dir.secret.read_text().strip())
    return asyncio.run(supervise(run_dir, build, secret=secret, host="127.0.0.1", node="", why="bench", stand_by=False))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
