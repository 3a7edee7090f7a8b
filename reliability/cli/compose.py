"""Builds a supervisor from the real parts: the one place that knows which half of each port is used."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.reliability.catalogue import Catalogue
from outlast.reliability.clock import SteadyClock
from outlast.reliability.config import load_frozen
from outlast.reliability.copies import Copies
from outlast.reliability.eventlog import read_events
from outlast.reliability.events import LogEvent, Seen
from outlast.reliability.inbox import Noticed
from outlast.reliability.model import CheckpointSeen, Node, Rank, XidSeen
from outlast.reliability.parts import IdentityChanges, Parts
from outlast.reliability.policy import Policy
from outlast.reliability.ports import CheckpointStore, Cluster, Starter
from outlast.reliability.rules_checkpoint import SUSPICIONS
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import Limits, RunFile
from outlast.reliability.site_policy import RunPolicy
from outlast.reliability.supervise import supervise
from outlast.reliability.supervisor import FENCED
from outlast.reliability.switchboard import Switchboard
from outlast.reliability.wire import RankStack

if TYPE_CHECKING:
    from outlast.checkpoint.remote import Remote
    from outlast.checkpoint.tiered import Near

QUIET_S = 0.3
"""The same fault on many nodes is written within this: less than a death settles, and than a second to the drain."""


def run_supervisor(
    run_dir: RunDir,
    *,
    why: str,
    in_batch: bool = False,
    epoch: int = 0,
    cluster: Cluster | None = None,
    on_event: Callable[[LogEvent], None] | None = None,
) -> int:
    """Supervise this run until it is over; an exit code of `outlast`."""
    run = load_frozen(run_dir)
    secret = bytes.fromhex(run_dir.secret.read_text().strip())
    node = os.environ.get("OUTLAST_NODE") or os.environ.get("SLURMD_NODENAME") or ""
    chosen = cluster or make_cluster(run_dir, run)
    copies = Copies(run_dir, run.tiers) if run.tiers.remote_url else None

    def build(board: Switchboard) -> Parts:
        told = copying(copies, board, on_event) if copies else on_event
        return make_parts(run_dir, run, board, chosen, node=node, in_batch=in_batch, on_event=told)

    host = address_of(chosen, run, Node(node))
    try:
        code = asyncio.run(
            supervise(run_dir, build, secret=secret, host=host, node=node, why=why, stand_by=in_batch, epoch=epoch)
        )
    finally:
        if copies:
            copies.close()
    if run.tiers.local_dir and code != FENCED:
        forget_local(run_dir, run)
    return code


def forget_local(run_dir: RunDir, run: RunFile) -> None:
    """The run is over: agents have freed what lay on the nodes, so what stands here promises nothing any more."""
    from outlast.checkpoint.local_tier import LocalTier

    with suppress(OSError):
        LocalTier(Path(run.checkpoint.dir) if run.checkpoint.dir else run_dir.checkpoints).clear()


def copying(
    copies: Copies, board: Switchboard, on_event: Callable[[LogEvent], None] | None
) -> Callable[[LogEvent], None]:
    """`on_event`, and each checkpoint that has become durable to the copies; what comes of one goes into the log."""
    loop = asyncio.get_running_loop()

    def tell(text: str) -> None:
        loop.call_soon_threadsafe(board.events.offer, Noticed(text=text))

    def look(event: LogEvent) -> None:
        if on_event is not None:
            on_event(event)
        match event.body:
            case Seen(signal=CheckpointSeen(train_step=train_step, verified=True)):
                copies.due(train_step, tell)

    return look


def make_cluster(run_dir: RunDir, run: RunFile) -> Cluster:
    """The scheduler that the run file names."""
    if run.cluster.kind == "local":
        from outlast.launchers.local import LocalCluster

        return LocalCluster(run_dir, run)
    from outlast.launchers.slurm_cluster import SlurmCluster

    return SlurmCluster(run_dir, run)


def make_parts(
    run_dir: RunDir,
    run: RunFile,
    board: Switchboard,
    cluster: Cluster,
    *,
    node: str,
    in_batch: bool,
    on_event: Callable[[LogEvent], None] | None,
) -> Parts:
    from outlast.launchers.specs import Ranks
    from outlast.reliability.pager import WebhookPager

    judged_by = RunPolicy(run_dir, run)
    slurm = run.cluster.kind != "local"
    starter: Starter = Ranks(run)
    return Parts(
        run_dir=run_dir,
        run=run,
        cluster=cluster,
        store=make_store(run_dir, run),
        starter=starter,
        pager=WebhookPager(run_dir.root, run.notify.webhook_file),
        clock=SteadyClock(),
        policy=make_policy(judged_by.catalogue, run.limits),
        board=board,
        find_suspect=find_suspect,
        on_event=on_event,
        identity_changes=lambda: identity_changes(run_dir, run),
        policy_notes=judged_by.notes,
        in_batch=in_batch,
        node=node,
        can_feed=slurm,
        has_drains=slurm,
        can_requeue=slurm and in_batch,
        poll_s=2.0 if not slurm else 3.0,
    )


def identity_changes(run_dir: RunDir, run: RunFile) -> IdentityChanges:
    from outlast.reliability.identity import Policy as Weight
    from outlast.reliability.identity import compare, read_identity, take_identity

    changes = compare(read_identity(run_dir.identity), take_identity(run, run_dir.name))
    words = [(c.policy, f"{c.name} was {c.was or 'absent'}, is {c.now or 'absent'}") for c in changes]
    return IdentityChanges(
        fatal=tuple(text for weight, text in words if weight is Weight.FATAL),
        other=tuple(text for weight, text in words if weight is Weight.WARN),
    )


def make_policy(catalogue: Catalogue, limits: Limits) -> Policy:
    """What supervisors judge by, and `outlast replay` with them."""
    return Policy(xid=catalogue.xid, kernel=catalogue.kernel, settle_s=limits.settle_s, quiet_s=QUIET_S)


def make_store(run_dir: RunDir, run: RunFile) -> CheckpointStore:
    from outlast.checkpoint.store import Store

    root = Path(run.checkpoint.dir) if run.checkpoint.dir else run_dir.checkpoints
    if not run.tiers.remote_url and not run.tiers.local_dir:
        return Store(root)
    from outlast.checkpoint.tiered import TieredStore

    return TieredStore(root, near=make_near(run_dir, root) if run.tiers.local_dir else None, far=make_far(run_dir, run))


def make_near(run_dir: RunDir, checkpoints: Path) -> Near:
    """The nodes' tier, asked from wherever the supervisor is."""
    from outlast.checkpoint.local_tier import LocalTier
    from outlast.checkpoint.shelf_roster import Roster
    from outlast.checkpoint.tiered import Near
    from outlast.launchers.tier_places import shelves_of

    secret = bytes.fromhex(run_dir.secret.read_text().strip())
    roster = Roster(folder=shelves_of(run_dir), secret=secret, me=Node("supervisor"))
    return Near(local=LocalTier(checkpoints), roster=roster, suspects=lambda: suspected(run_dir))


def suspected(run_dir: RunDir) -> dict[Node, float]:
    """Nodes with a GPU whose memory goes wrong, and since when: the log is asked, so that a successor knows too."""
    since: dict[Node, float] = {}
    for event in read_events(run_dir.events).events:
        match event.body:
            case Seen(signal=XidSeen(node=node, at_s=at_s, code=code)) if code in SUSPICIONS:
                since.setdefault(node, at_s)
    return since


def make_far(run_dir: RunDir, run: RunFile) -> Remote | None:
    if not run.tiers.remote_url:
        return None
    from outlast.checkpoint.objects import FsspecObjects
    from outlast.checkpoint.remote import Remote

    # below the run's own name: two runs of one run file must not restore each other's
    return Remote(FsspecObjects(f"{run.tiers.remote_url.rstrip('/')}/{run_dir.name}"))


def find_suspect(stacks: Sequence[RankStack]) -> tuple[Rank | None, str]:
    from outlast.monitors.hang import StackFacts, find

    return find(
        tuple(
            StackFacts(
                rank=s.rank,
                process_state=s.process_state,
                waiting=s.waiting,
                phase=s.phase,
                train_step=s.train_step,
                still_s=s.still_s,
                stack=s.stack,
            )
            for s in stacks
        )
    )


def address_of(cluster: Cluster, run: RunFile, node: Node) -> str:
    """The address on which the run's nodes reach this process. Loopback unless the nodes are elsewhere."""
    if run.cluster.kind == "local":
        return "127.0.0.1"
    from outlast.launchers.slurm_cluster import SlurmCluster

    if node and isinstance(cluster, SlurmCluster) and (address := cluster.address(node)):
        return address
    return socket.gethostbyname(socket.gethostname())
