"""The state of a run, to and from a checkpoint: model, optimizer, generators, train_step, samples consumed.

    Trainee + Progress --sharded_state--> {model, optimizer, rng, outlast} --Saver--> checkpoint_dir/iter_0000010
        until Saving.finish() the weights and moments must stay as they are: it is called before the next update
    restore_dir --load_common--> is it this run's? --load--> Trainee + Progress

Tensors are named and cut by their global position, so a checkpoint loads into any tp, pp, ep and dp. What does not
reshard is the state of the random generators: into another layout it is drawn anew from the seed and the train_step.
How files are written, hashed and committed is the checkpoint room's business.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject  # type: ignore[import-untyped]
from megatron.core.tensor_parallel import get_cuda_rng_tracker  # type: ignore[import-untyped]

from outlast.checkpoint import megatron_load, megatron_plan  # noqa: F401 -- else imported by each rank, when it saves
from outlast.checkpoint.dcp_reader import Bring
from outlast.checkpoint.job import Spread
from outlast.checkpoint.live_prints import LivePrints, check_after_restore
from outlast.checkpoint.manifest import Identity
from outlast.checkpoint.names import name_step
from outlast.checkpoint.ops import RealOps
from outlast.checkpoint.prints import Prints, write_prints
from outlast.checkpoint.reader import load, load_common
from outlast.checkpoint.spreading import store_of
from outlast.checkpoint.writer import Saver
from outlast.launchers.megatron_fixes import settle_parameters
from outlast.launchers.trainer_args import Settings, TrainerError
from outlast.launchers.trainer_data import VOCABULARY
from outlast.launchers.trainer_model import Trainee
from outlast.launchers.trainer_world import World, seed_generators
from outlast.reliability.model import Layout

log = logging.getLogger(__name__)

_FORMAT: Final[dict[str, Any]] = {
    # the one optimizer format that loads into another tp and pp
    "distrib_optim_sharding_type": "fully_reshardable",
    # dense and expert optimizers name their tensors alike, so that they reshard between ep 1 and more
    "chained_optim_avoid_prefix": True,
}


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the run is."""

    train_step: int = 0
    """Finished train_steps."""
    samples: int = 0
    """Samples consumed: the stream's ordinals [0, samples)."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a checkpoint must agree with to be this run's; kept in its common part."""

    layers: int
    hidden: int
    heads: int
    experts: int
    seq: int
    seed: int
    data: str
    """The corpus' identity: sample numbers mean nothing over another text."""


def describe_run(settings: Settings, data: str) -> RunFacts:
    return RunFacts(
        layers=settings.layers,
        hidden=settings.hidden,
        heads=settings.heads,
        experts=settings.experts,
        seq=settings.seq,
        seed=settings.seed,
        data=data,
    )


def agree_on_data(identity: str, world: World) -> None:
    """Refuse ranks that would number the samples of different texts (another Python on one node). Collective."""
    ours = int(identity[:15], 16)
    ends = torch.tensor([ours, -ours], dtype=torch.int64, device=world.device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    if ends[0] != -ends[1]:
        raise TrainerError(f"rank {world.env.rank}: corpus {identity}; another rank has another: share one --data-dir")


def layout_of(world: World) -> Layout:
    return Layout(tp=world.tp, pp=world.pp, ep=world.ep, dp=world.dp)


def save_state(
    saver: Saver,
    trainee: Trainee,
    world: World,
    progress: Progress,
    facts: RunFacts,
    parents: tuple[str, ...] = (),
    prints: LivePrints | None = None,
    root: Path = Path(),
    spread: Spread | None = None,
) -> Saving:
    """Start saving. Collective. Weights and moments may change after finish() of what it returns.

    With `prints`, fingerprints of the state are stored beside the manifest, below `root`, the saver's directory.
    spread: a local checkpoint.
    """
    began_s = time.monotonic()
    for chunk in trainee.wrapped:
        settle_parameters(chunk)
    state = sharded_state(trainee, world, is_loading=False)
    state["rng"] = _generators(world)
    state["outlast"] = _describe_save(progress, facts, world)
    saver.save(
        state,
        train_step=progress.train_step,
        samples=progress.samples,
        layout=layout_of(world),
        identity=Identity(rng=f"seed {facts.seed}", data=facts.data),
        pins={"data": facts.data},
        parents=parents,
        content_metadata=dict(_FORMAT),
        overlap=True,
        spread=spread,
    )
    saving = Saving(saver, prints, progress.train_step, store_of(root, spread).directory)
    if not saver.overlaps:
        saving.finish()
    saving.hold_s = time.monotonic() - began_s
    return saving


class Saving:
    """A save whose copy, and whose fingerprints, may still be under way beside the forward and backward passes."""

    def __init__(self, saver: Saver, prints: LivePrints | None, train_step: int, root: Path) -> None:
        self.hold_s = 0.0
        """For how long training was held when it began."""
        self._saver, self._prints, self._root = saver, prints, root
        self._counting = prints.begin(train_step) if prints and saver.in_flight == train_step else None

    def finish(self) -> float:
        """Collective. The state may change once it returns; returns for how long that held training."""
        began_s = time.monotonic()
        self._saver.finish_copy()
        if self._prints is not None and self._counting is not None:
            taken = self._prints.finish(self._counting)
            self._counting = None
            if dist.get_rank() == 0:
                _store_prints(taken, self._root)
        return time.monotonic() - began_s


def prepare_saves(saver: Saver, trainee: Trainee, world: World) -> None:
    """Plan saves of this state, and make room for them. Collective."""
    state = sharded_state(trainee, world, is_loading=False)
    state["rng"] = _generators(world)
    saver.prepare(state)


def _describe_save(progress: Progress, facts: RunFacts, world: World) -> dict[str, Any]:
    steps = {"train_step": progress.train_step, "samples": progress.samples}
    return {**steps, "run": asdict(facts), "ranks": _rank_grid(world)}


def watch_prints(trainee: Trainee) -> LivePrints:
    """What takes and compares fingerprints of this state."""
    return LivePrints(trainee.modules, trainee.optimizer, vocabulary=VOCABULARY)


def _store_prints(taken: Prints, root: Path) -> None:
    """A checkpoint without fingerprints is whole: that they cannot be stored fails no save."""
    try:
        write_prints(RealOps(), root / name_step(taken.train_step), taken)
    except OSError as e:
        log.warning("fingerprints of train_step %d not stored: %s", taken.train_step, e)


def load_state(
    path: Path,
    trainee: Trainee,
    world: World,
    facts: RunFacts,
    prints: LivePrints | None = None,
    bring: Bring | None = None,
) -> Progress:
    """Fill model, optimizer and generators from a checkpoint of this run, saved in any layout. Collective.

    Raises TrainerError where it is another run's, what the reader raises where it is not whole, and NotAsSaved where
    what came out of it is not what was saved. bring: see reader.load.
    """
    common, _ = load_common(path, partial=bring is not None)
    kept = common.get("outlast")
    if not isinstance(kept, dict):
        raise TrainerError(f"{path}: no entry 'outlast' in common.pt: this trainer did not write it")
    refusal = why_not_ours(facts, RunFacts(**kept["run"]))
    if refusal:
        raise TrainerError(f"{path}: {refusal}")
    same_layout = kept["ranks"] == _rank_grid(world)
    request = sharded_state(trainee, world, is_loading=True)
    if same_layout:
        request["rng"] = _generators(world)
    state, _ = load(request, path, bring=bring)
    for name, module in _name_chunks(trainee).items():
        module.load_state_dict(state[name])
    trainee.optimizer.load_state_dict(state["optimizer"])
    if prints is not None:
        check_after_restore(prints, path)
    progress = Progress(train_step=kept["train_step"], samples=kept["samples"])
    if same_layout:
        _set_generators(state["rng"])
    else:
        seed_generators(facts.seed + progress.train_step)
    return progress


def why_not_ours(ours: RunFacts, theirs: RunFacts) -> str:
    """'' where a checkpoint with these facts continues this run, else the first difference."""
    for name, found in asdict(theirs).items():
        wanted = getattr(ours, name)
        if found != wanted:
            return f"{name} is {found!r} in the checkpoint, {wanted!r} in this run: another run's checkpoint"
    return ""


def sharded_state(trainee: Trainee, world: World, *, is_loading: bool) -> dict[str, Any]:
    """Model and optimizer as Megatron names and cuts them."""
    model = {name: module.sharded_state_dict() for name, module in _name_chunks(trainee).items()}
    optimizer = trainee.optimizer.sharded_state_dict(dict(model), is_loading=is_loading, metadata=dict(_FORMAT))
    return {**model, "optimizer": optimizer}


def _name_chunks(trainee: Trainee) -> dict[str, Any]:
    """As Megatron names them: its optimizer looks for these."""
    if len(trainee.modules) == 1:
        return {"model": trainee.modules[0]}
    return {f"model{number}": module for number, module in enumerate(trainee.modules)}


def _rank_grid(world: World) -> list[int]:
    return [world.tp, world.pp, world.ep, world.dp]


def _generators(world: World) -> Any:
    """This rank's generator states: one object a rank, so it loads into the same layout only."""
    states = {"cpu": torch.get_rng_state(), "tracked": get_cuda_rng_tracker().get_states()}
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    rank, world_size = world.env.rank, world.env.world_size
    return ShardedObject("outlast/rng", states, (world_size,), (rank,), replica_id=0)


def _set_generators(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracked"])


def advance(progress: Progress, global_batch: int) -> Progress:
    return replace(progress, train_step=progress.train_step + 1, samples=progress.samples + global_batch)
