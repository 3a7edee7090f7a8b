"""All ranks of an attempt with command line and environment: ports.Starter over the kinds in adapt.py. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from outlast.launchers.adapt import Kind, for_run, kind_of
from outlast.launchers.rank_env import rank_env
from outlast.reliability.model import Layout, Node, Plan, Rank
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import RunFile
from outlast.reliability.wire import RankSpec


class Ranks:
    """The Starter of a run."""

    def __init__(self, run: RunFile) -> None:
        self.kind: Kind = for_run(run)
        self.losses_agree = kind_of(run) != "plain"
        """All ranks of the last pipeline stage tell the same loss; of a plain program nothing is known."""

    def ranks(
        self, run: RunFile, run_dir: RunDir, plan: Plan, *, addresses: Mapping[Node, str], master_port: int
    ) -> tuple[RankSpec, ...]:
        argv, program = self.kind.argv(run, plan), self.kind.env(run, plan)
        last, stand_in = len(plan.ranks) - 1, stand_in_of(plan) if self.losses_agree else None
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
                stands_in=place.rank == stand_in,
            )
            for place in plan.ranks
        )

    def legal(self, run: RunFile, layout: Layout) -> str:
        return self.kind.legal(run, layout)


def stand_in_of(plan: Plan) -> Rank | None:
    """The rank that knows the reporting rank's losses and does not die with its node; None where there is none.

    Ranks of one pipeline stage are consecutive in Megatron's order, and those of the last stage all hold the loss that
    was reduced over data parallel ranks.
    """
    *others, last = plan.ranks
    stage = others[len(plan.ranks) - len(plan.ranks) // plan.layout.pp :]
    return next((place.rank for place in reversed(stage) if place.node != last.node), None)
