"""Does it fit together? Checks of a whole RunFile that need no file and no cluster. Pure."""

from __future__ import annotations

import math
import re
from typing import Final

from outlast.reliability.durations import render_duration
from outlast.reliability.model import Noun
from outlast.reliability.runfile import RunFile

RESERVED_ENV: Final = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "NODE_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
)


_URL: Final = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<place>\S+)")
_PAGE: Final = re.compile(r"https?://[A-Za-z0-9.%_\[\]:-]{1,255}(?:/[^\s@]{0,255})?")


class Complaint(Noun, frozen=True, kw_only=True):
    """What does not fit, and the setting to look at."""

    path: str
    text: str


def check_together(run: RunFile) -> tuple[Complaint, ...]:
    """Everything that does not fit, in the file's order."""
    own = (*_check_task(run), *_check_cluster(run), *_check_layout(run), *_check_checkpoint(run))
    return (*own, *_check_tiers(run), *_check_rest(run))


def _check_task(run: RunFile) -> list[Complaint]:
    task, found = run.task, []
    ways = [name for name in ("script", "module", "command") if getattr(task, name)]
    if len(ways) != 1:
        seen = " and ".join(ways) or "none of them"
        text = f"found {seen}, expected exactly one of script, module and command"
        found.append(Complaint(path="$.task", text=text))
    reserved = [name for name in task.env if name in RESERVED_ENV or name.startswith(("OUTLAST_", "TORCHELASTIC_"))]
    for name in reserved:
        found.append(Complaint(path=f"$.task.env.{name}", text="set for each rank by outlast itself; leave it out"))
    if task.command and task.kind in ("reference", "megatron_lm"):
        text = f"{task.kind} needs a script or a module, found a command; expected auto or plain"
        found.append(Complaint(path="$.task.kind", text=text))
    return found


def _check_cluster(run: RunFile) -> list[Complaint]:
    cluster, found = run.cluster, []
    if cluster.nodes_min > cluster.nodes:
        text = f"{cluster.nodes_min} is more than nodes {cluster.nodes}; expected at most {cluster.nodes}"
        found.append(Complaint(path="$.cluster.nodes_min", text=text))
    if run.nodes_min < cluster.nodes and not run.layout.may_change:
        text = f"nodes_min {run.nodes_min} is below nodes {cluster.nodes}, but nothing may change; expected [dp]"
        found.append(Complaint(path="$.layout.may_change", text=text))
    if cluster.kind == "local" and cluster.gpus_per_node:
        text = "the local cluster has no GPUs to give; expected 0, with ranks_per_node for the number of ranks"
        found.append(Complaint(path="$.cluster.gpus_per_node", text=text))
    if cluster.exporter not in ("", "local") and not _PAGE.fullmatch(cluster.exporter):
        text = "no URL; expected local, or one such as http://%n:9400/metrics without a user in it"
        found.append(Complaint(path="$.cluster.exporter", text=text))
    return found


def _check_layout(run: RunFile) -> list[Complaint]:
    layout, nodes, each = run.layout, run.cluster.nodes, run.ranks_per_node
    things = "GPUs" if run.cluster.gpus_per_node == each else "ranks"
    replica = layout.tp * layout.pp * layout.cp
    words = " x ".join(f"{n} {getattr(layout, n)}" for n in ("tp", "pp", "cp") if getattr(layout, n) > 1) or "tp 1"
    world = nodes * each
    if world % replica:
        rest = f"nodes {nodes} x {each} = {world} is no multiple of it"
        if world < replica:
            rest = f"nodes {nodes} x {each} = {world} are too few"
        advice = f"Raise nodes to {_nodes_for(replica, each, nodes)} or lower {_largest(run)}."
        return [Complaint(path="$.layout", text=f"{words} needs {replica} {things} a replica; {rest}. {advice}")]
    smallest = math.prod(getattr(layout, n) for n in ("tp", "pp", "cp") if n not in layout.may_change)
    least = run.nodes_min
    if least <= nodes and least * each < smallest:
        enough = math.ceil(smallest / each)
        text = (
            f"{words} needs {replica} {things} a replica; nodes_min {least} x {each} = {least * each} leaves none. "
            f"Raise nodes_min to {enough} or lower {_largest(run)}."
        )
        return [Complaint(path="$.layout", text=text)]
    return _check_ep(run, world // replica)


def _nodes_for(replica: int, each: int, nodes: int) -> int:
    """The next number of nodes that holds whole replicas."""
    whole = replica // math.gcd(replica, each)
    return math.ceil(nodes / whole) * whole


def _largest(run: RunFile) -> str:
    """The size to lower: pp before tp, since the pieces of a layer stay as they are."""
    return next((name for name in ("pp", "tp", "cp") if getattr(run.layout, name) > 1), "tp")


def _check_ep(run: RunFile, dp: int) -> list[Complaint]:
    wide = dp * run.layout.cp
    if wide % run.layout.ep == 0:
        return []
    text = f"{run.layout.ep} does not divide dp {dp} x cp {run.layout.cp} = {wide}; expected a divisor of {wide}"
    return [Complaint(path="$.layout.ep", text=text)]


def _check_tiers(run: RunFile) -> list[Complaint]:
    tiers, found = run.tiers, []
    url = _URL.fullmatch(tiers.remote_url)
    if tiers.remote_url and url is None:
        text = "no URL; expected one such as s3://bucket/prefix or file:///path"
        found.append(Complaint(path="$.tiers.remote_url", text=text))
    elif url is not None and "@" in url["place"]:
        text = "holds a user or a key; expected the plain URL: keys come from the environment or a file of mode 0600"
        found.append(Complaint(path="$.tiers.remote_url", text=text))
    found += [Complaint(path=f"$.tiers.{name}", text=text) for name, text in _check_local(run) if text]
    return found


def _check_local(run: RunFile) -> tuple[tuple[str, str], ...]:
    tiers, every = run.tiers, run.checkpoint.every_steps
    if not tiers.local_dir:
        alone = "of no use without local_dir; expected 0, or a directory of each node's own in local_dir"
        return (("local_every_steps", alone if tiers.local_every_steps else ""),)
    place = ""
    if not tiers.local_dir.startswith("/"):
        place = f"{tiers.local_dir} is no path from the root; expected one that each node has of its own"
    elif run.cluster.kind == "local" and "%n" not in tiers.local_dir:
        place = "all nodes of the local cluster are this machine; expected a path with %n, the node's name"
    steps = ""
    if not tiers.local_every_steps:
        steps = "0 takes none; expected a number of train_steps, less than checkpoint.every"
    elif 0 < every <= tiers.local_every_steps:
        steps = f"{tiers.local_every_steps} is no less than checkpoint.every_steps {every}; expected less"
    return ("local_dir", place), ("local_every_steps", steps)


def _check_rest(run: RunFile) -> list[Complaint]:
    limits, found = run.limits, []
    if limits.lease_s and limits.agent_silent_s >= limits.lease_s * 3:
        text = (
            f"{limits.agent_silent_s:g} s is long beside lease_s {limits.lease_s:g} s; expected less than 3 x lease_s"
        )
        found.append(Complaint(path="$.limits.agent_silent_s", text=text))
    for name in ("start_timeout_s", "hang_floor_s", "silent_s", "agent_silent_s", "lease_s"):
        if getattr(limits, name) <= 0:
            found.append(
                Complaint(path=f"$.limits.{name}", text="0 would end every attempt at once; expected more than 0")
            )
    return found


def _check_checkpoint(run: RunFile) -> list[Complaint]:
    every = run.checkpoint
    if every.every_max_s and every.every_min_s > every.every_max_s:
        text = f"{every.every_min_s:g} s is more than every_max_s {every.every_max_s:g} s; expected no more than it"
        return [Complaint(path="$.checkpoint.every_min_s", text=text)]
    return []


def describe(run: RunFile) -> tuple[str, ...]:
    """What the settings come to, in sentences for `config check`."""
    layout, cluster, every = run.layout, run.cluster, run.checkpoint
    world = cluster.nodes * run.ranks_per_node
    dp = world // (layout.tp * layout.pp * layout.cp)
    lines = [f"{world} ranks on {cluster.nodes} nodes: tp {layout.tp} x pp {layout.pp} x cp {layout.cp} x dp {dp}"]
    if cluster.spares:
        lines.append(f"spares asked for besides: {cluster.spares}, so {cluster.nodes + cluster.spares} nodes in all")
    if run.nodes_min < cluster.nodes:
        lines.append(
            f"nodes lost beyond the spares: {', '.join(layout.may_change)} may shrink; fewest nodes: {run.nodes_min}"
        )
    else:
        lines.append("nodes lost beyond the spares: the run waits, it may not shrink (nodes_min)")
    often = f"{every.every_steps} train_steps" if every.every_steps else render_duration(every.every_s)
    kept = f"the newest {every.keep_last} are kept"
    kept += f", and one in each {every.keep_every} train_steps" if every.keep_every else ""
    lines.append(f"a checkpoint every {often}, {kept}")
    if every.auto:
        lines.append(
            f"once the run has shown its saves, as often as it pays: every {render_duration(every.every_min_s)} to "
            f"{render_duration(every.every_max_s)}, by what saves cost and how often attempts fail"
        )
    if run.tiers.local_dir:
        lines.append(
            f"between them one every {run.tiers.local_every_steps} train_steps on the nodes ({run.tiers.local_dir}), "
            "with a copy on another node"
        )
    if run.tiers.remote_url:
        nth = "each" if run.tiers.remote_every == 1 else f"one of {run.tiers.remote_every}"
        lines.append(
            f"{nth} is copied to {run.tiers.remote_url} once it is durable, {run.tiers.remote_keep_last} are kept there"
        )
    target = f"train_step {run.train_steps}" if run.train_steps else "the program's own end (exit 0)"
    return (*lines, f"finished at {target}")
