"""The trainer's part in local checkpoints: where this node's parts lie, and a restore from parts on many nodes.

Only in a supervised run: its shelf keeps, copies and hands out the parts (checkpoint/shelf.py). No torch at import.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from outlast.checkpoint.bringing import bring
from outlast.checkpoint.errors import CheckpointError, NotWhole
from outlast.checkpoint.job import Spread
from outlast.checkpoint.local_tier import LocalTier, is_local
from outlast.checkpoint.names import parse_step
from outlast.checkpoint.shelf_box import Box
from outlast.checkpoint.shelf_roster import Roster
from outlast.launchers.recorder import NODE_ENV
from outlast.launchers.tier_places import box_of, shelves_of
from outlast.launchers.trainer_args import Settings, TrainerError
from outlast.reliability.model import Node
from outlast.reliability.rundir import RunDir

if TYPE_CHECKING:
    from outlast.launchers.trainer_world import World

COMMON: Final = "common.pt"
Bring = Callable[[Collection[str]], None]


@dataclass(frozen=True, kw_only=True)
class Place:
    """This node, as local checkpoints know it."""

    node: Node
    local: LocalTier
    box: Box
    roster: Roster

    def spread(self, train_step: int) -> Spread:
        """What a save of this train_step to the nodes needs to know."""
        return Spread(node=self.node, shards=str(self.box.directory(train_step)))


def open_place(settings: Settings, env: Mapping[str, str]) -> Place | None:
    """None where no local checkpoints are asked for."""
    if not settings.local_dir:
        return None
    run, node = env.get("OUTLAST_RUN_DIR", ""), Node(env.get(NODE_ENV, ""))
    if not run or not node or settings.checkpoint_dir is None:
        raise TrainerError("--local-dir: its parts are kept by the agents of a supervised run; leave it out here")
    run_dir = RunDir(root=Path(run))
    secret = bytes.fromhex(run_dir.secret.read_text().strip())
    box = Box(box_of(run_dir, settings.local_dir, node))
    box.claim()
    return Place(
        node=node,
        local=LocalTier(settings.checkpoint_dir),
        box=box,
        roster=Roster(folder=shelves_of(run_dir), secret=secret, me=node),
    )


def settle_restore(path: Path, place: Place | None, world: World) -> tuple[Path, Bring | None]:
    """The directory that this rank reads, and what brings shards there that it needs. Collective.

    For a local checkpoint that is this node's own: one rank a node brings the index, and the unsharded part; the rest
    comes as it is read. NotWhole on every rank where something is on no node.
    """
    import torch.distributed as dist

    if not is_local(path):
        return path, None
    step = parse_step(path.name)
    if place is None or step is None:
        raise TrainerError(f"{path}: a local checkpoint; expected --local-dir, as it was saved with")
    why = ""
    if world.env.local_rank == 0:
        try:
            bring(place.local, step, place.box, place.roster, names=(COMMON,))
        except (CheckpointError, OSError) as e:
            why = f"node {place.node}: {e}"
    said: list[str] = [""] * world.env.world_size
    dist.all_gather_object(said, why)
    if problems := tuple(one for one in said if one):
        raise NotWhole(path.name, problems)

    def bring_more(names: Collection[str]) -> None:
        bring(place.local, step, place.box, place.roster, names=names, index=False)

    return place.box.directory(step), bring_more
