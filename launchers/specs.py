"""All ranks of an attempt with command line and environment: ports.Starter over the kinds in adapt.py. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from outlast.launchers.adapt import Kind, for_run
from outlast.launchers.rank_env import rank_env
from outlast.reliability.model import Layout, Node, Plan
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import RunFile
from outlast.reliability.wire import RankSpec


class Ranks:
    """The Starter of a run."""

    def __init__(self, run: RunFile) -> None:
        self.kind: Kind = for_run(run)

    def ranks(
        self, run: RunFile, run_dir: RunDir, plan: Plan, *, addresses: Mapping[Node, str], master_port: int
    ) -> tuple[RankSpec, ...]:
        argv, program = self.kind.argv(run, plan), self.kind.env(run, plan)
        last = len(plan.ranks) - 1
        return tuple(
            RankSpec(
                placement=place,
                env=rank_env(
                    run,
                    plan,
                    place,
                    master_addr=addresses.get(plan.nodes[0], "127.0.0.1"),
                    master_port=master_port,
                    run_dir=run_dir.root,
                    program=program,
                ),
                argv=argv,
                reports=place.rank == last,
            )
            for place in plan.ranks
        )

    def legal(self, run: RunFile, layout: Layout) -> str:
        return self.kind.legal(run, layout)
