"""Rules on the node under the GPUs: PCIe, memory, CPU, disks, network ports, clients of shared file systems. Pure.

A local part that fails takes its node out. A shared thing that fails reaches many nodes, and then none of them is
blamed. What is corrected is counted; only its rate means something.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from outlast.reliability.judging.facts import HostFault, Measured
from outlast.reliability.judging.scene import MANY_NODES, Scene, ids, near, nodes_of, place
from outlast.reliability.judging.words import Act, Finding, lost
from outlast.reliability.verdict import Kind

CORRECTED_MANY: Final = 100
"""Corrected errors of one device in one case: a link or module that is going."""
FLAPS_MANY: Final = 3
_BROKEN: Final = frozenset(
    {"pcie_fatal", "host_memory_ue", "host_mce", "gpu_bus_loss", "nvlink_fatal", "nvswitch_fatal"}
)
_CORRECTED: Final = frozenset({"pcie_correctable", "host_memory_ce"})
_STUCK: Final = frozenset({"soft_lockup", "hard_lockup", "kernel_panic", "kernel_oops"})


def broken_parts(scene: Scene) -> Iterator[Finding]:
    """A line that a broken part of this node alone can cause."""
    own = [h for h in scene.seen(HostFault) if h.action != "ignore"]
    loud = [h for h in own if (h.class_ in _BROKEN and h.action.startswith("drain")) or h.key == "nic_health"]
    disks = [h for h in own if h.class_ == "storage_error"]
    failed = [h for h in disks if h.key in ("disk_array", "fs_readonly")]
    if not loud and not disks:
        return
    chief = (loud or failed or disks)[0]
    group = near([h for h in own if h.class_ == chief.class_])
    if len(nodes_of(group)) >= MANY_NODES:
        yield _common(chief, group)
        return
    sure = bool(loud or failed) or sum(h.times for h in disks) > 1
    bearing = [*loud, *disks]
    yield Finding(
        verdict=Kind.HARDWARE_FAULT if sure else Kind.HARDWARE_SUSPECT,
        action=Act.SPARE if sure else Act.JOB_END,
        rule=chief.class_,
        why=f"{chief.meaning}: a part of {chief.node or 'the node'}; jobs fail on it sooner or later",
        culprit=f"{chief.node or 'the node'}"
        + (f" {chief.device}" if chief.device else "")
        + (" (local disk)" if chief.class_ == "storage_error" else ""),
        evidence=ids([chief, *bearing]),
        rejected=(lost("wait for a GPU sign", "not every fault of a node is a GPU's"),),
        checks={"occurrences": _occurrences(bearing, chief.key)} if disks else {},
    )


def _occurrences(faults: Sequence[HostFault], key: str) -> int:
    """How often the first kind of line was written, folded lines counted as often as they stand for."""
    first = faults[0].key if faults else key
    return sum(h.times for h in faults if h.key == first)


def _common(chief: HostFault, group: Sequence[HostFault]) -> Finding:
    return Finding(
        verdict=Kind.INFRA_EVENT,
        action=Act.PAGE,
        rule="many_nodes_at_once",
        why=f"{chief.meaning}, on {len(nodes_of(group))} nodes at once: a common cause, no node is blamed",
        evidence=ids(group),
        rejected=(lost("each node", "nodes do not break in the same way together"),),
        checks={"nodes": len(nodes_of(group))},
    )


def shared_files(scene: Scene) -> Iterator[Finding]:
    """Lustre, NFS, GPFS: a server that does not answer is everybody's; a client thrown out alone is its node's."""
    own = scene.seen(HostFault)
    stalls = [h for h in own if h.class_ == "filesystem_stall"]
    gone = [h for h in own if h.class_ == "filesystem_lost"]
    if not stalls and not gone:
        return
    back = [h for h in stalls if h.key.endswith("_back")]
    reach = max(len(nodes_of([*stalls, *gone])), scene.reach)
    if gone and reach < MANY_NODES:
        verdict, action, why = Kind.INFRA_EVENT, Act.REBOOT, "this client alone lost its mount: remount or reboot it"
    elif back and max(h.id for h in back) > max((h.id for h in stalls if h not in back), default=0) and not gone:
        verdict, action, why = Kind.TRANSIENT, Act.LOG, "the server did not answer for a while and is back"
    else:
        verdict, action, why = Kind.INFRA_EVENT, Act.WAIT, "a shared file system does not answer: wait for it"
    yield Finding(
        verdict=verdict,
        action=action,
        rule="shared_file_system",
        why=why,
        culprit=gone[0].node if gone and reach < MANY_NODES else "storage",
        evidence=ids([*gone, *stalls]),
        rejected=(lost("the nodes", "what they share does not answer"),),
    )


def port_stays_down(scene: Scene) -> bool:
    """Some node's kernel lost a port's link and did not tell that it came back."""
    own = scene.seen(HostFault)
    downs = [h for h in own if h.key == "nic_down"]
    ups = [h for h in own if h.key in ("nic_up", "nic_module_up")]
    return bool(downs) and (not ups or max(u.id for u in ups) < max(d.id for d in downs))


def ports(scene: Scene) -> Iterator[Finding]:
    """Network ports and cables. Heat or a flap alone is noted; with slower communication the cable is suspected."""
    own = [h for h in scene.seen(HostFault) if h.class_ in ("nic_link_flap", "nic_health", "nic_power")]
    own = [h for h in own if h.key != "nic_health" and h.action != "ignore"]
    if not own:
        return
    slower = [m for m in scene.seen(Measured) if m.what == "communication" and m.change > 0]
    downs = [h for h in own if h.key == "nic_down"]
    hot = [h for h in own if h.key in ("nic_module", "nic_timeout")]
    stays = port_stays_down(scene)
    if len(nodes_of(near(downs))) >= MANY_NODES:
        yield _common(downs[0], downs)
        return
    flapping = len(downs) >= FLAPS_MANY
    if stays and not flapping:
        verdict, action = Kind.HARDWARE_SUSPECT, Act.SPARE
    elif flapping or ((hot or downs) and slower):
        verdict, action = Kind.HARDWARE_SUSPECT, Act.JOB_END
    elif hot:
        verdict, action = Kind.HARDWARE_SUSPECT, Act.LOG
    else:
        verdict, action = (Kind.TRANSIENT if downs else Kind.NO_FAULT), Act.LOG
    chief = (hot or downs or own)[0]
    suspect = verdict is Kind.HARDWARE_SUSPECT
    yield Finding(
        verdict=verdict,
        action=action,
        rule="network_port",
        why=f"{chief.meaning} on {chief.node or 'the node'}"
        + ("; communication is slower, compute is not" if slower else "")
        + ("; the link stays down" if stays else ""),
        culprit=f"{chief.node or 'the node'} {chief.device or 'port'} cable or transceiver" if suspect else None,
        evidence=ids([*own, *slower]),
        rejected=(lost("a GPU of the node", "communication is told from compute first"),),
    )


def processors(scene: Scene) -> Iterator[Finding]:
    """CPUs and kernel: a stuck one needs a reboot; a task that waits is no proof of anything."""
    own = [h for h in scene.seen(HostFault) if h.class_ == "kernel_hung"]
    stuck = [h for h in own if h.key in _STUCK]
    if stuck and len(nodes_of(near(stuck))) >= MANY_NODES:
        yield _common(stuck[0], stuck)
    elif not stuck and len(nodes_of(own)) >= MANY_NODES:
        yield Finding(
            verdict=Kind.INFRA_EVENT,
            action=Act.WAIT,
            rule="many_nodes_wait",
            why=f"tasks wait without end on {len(nodes_of(own))} nodes: for what they share, storage most often",
            culprit="storage",
            evidence=ids(own),
            rejected=(lost("the nodes", "what they share does not answer"),),
        )
    elif own:
        chief = (stuck or own)[0]
        yield Finding(
            verdict=Kind.AMBIGUOUS,
            action=Act.REBOOT if stuck else Act.LOG,
            rule="kernel_stuck",
            why=f"{chief.meaning} on {chief.node or 'the node'}: driver, program or part, a reboot tells",
            culprit=chief.node or "the node",
            evidence=ids(own),
            rejected=(lost("replace a part", "no line names one"),),
        )


def out_of_memory(scene: Scene) -> Iterator[Finding]:
    """The kernel killed for memory: the job's own limit, or the whole node."""
    own = [h for h in scene.seen(HostFault) if h.class_ in ("oom_job", "oom_node")]
    if not own:
        return
    whole = [h for h in own if h.class_ == "oom_node"]
    jobs = [h for h in own if h.class_ == "oom_job"]
    many = len(nodes_of(own)) > 1
    verdict = Kind.SOFTWARE_FAULT if many else Kind.APP_FAULT if jobs else Kind.AMBIGUOUS
    yield Finding(
        verdict=verdict,
        action=Act.STOP if jobs or many else Act.REBOOT,
        rule="out_of_memory",
        why="the job used more host memory than its limit; a restart uses as much again"
        if jobs
        else "the whole node ran out of memory, and the kernel chose what to kill",
        culprit="the program" if jobs else (whole[0].node or "the node"),
        evidence=ids(own),
        rejected=(lost("the nodes", "which process is killed is the kernel's choice"),),
    )


def slowed(scene: Scene) -> Iterator[Finding]:
    """A device that trained narrower than it should, or a CPU slowed down for heat."""
    own = [h for h in scene.seen(HostFault) if h.class_ in ("pcie_degraded", "gpu_thermal") and h.action != "ignore"]
    if own:
        chief = own[0]
        yield Finding(
            verdict=Kind.HARDWARE_SUSPECT,
            action=Act.JOB_END if chief.action.startswith("drain") else Act.LOG,
            rule=chief.class_,
            why=f"{chief.meaning} on {chief.node or 'the node'}: a silent straggler",
            culprit=place(chief, None, chief.device),
            evidence=ids(own),
            rejected=(lost("at once", "the job still runs, only slower"),),
        )


def corrected(scene: Scene) -> Iterator[Finding]:
    """Errors that were corrected: their rate counts, not their being there."""
    own = [h for h in scene.seen(HostFault) if h.class_ in _CORRECTED or h.class_ == "host_hw_recoverable"]
    own = [h for h in own if h.action != "ignore"] or own
    if not own:
        return
    counts: dict[tuple[str | None, str], int] = {}
    for h in own:
        counts[(h.node, h.device)] = counts.get((h.node, h.device), 0) + h.times
    worst = max(counts, key=lambda at: counts[at])
    many = counts[worst] >= CORRECTED_MANY
    yield Finding(
        verdict=Kind.HARDWARE_SUSPECT if many else Kind.NO_FAULT,
        action=Act.JOB_END if many else Act.LOG,
        rule="corrected_errors",
        why=f"{own[0].meaning}: {counts[worst]} in this case" + ("" if many else ", counted and nothing more"),
        culprit=" ".join(w for w in worst if w) if many else None,
        evidence=ids(own),
        rejected=() if many else (lost("hardware", "corrected errors are what correction is for"),),
        checks={"occurrences": counts[worst]},
    )
