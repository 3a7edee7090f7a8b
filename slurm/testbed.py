"""A real Slurm on this host, in one directory: slurmctld, slurmd per node, slurmdbd with MariaDB, own munged.

For tests and for trying things, by root or any other user, without systemd and without touching a Slurm that runs here
already. Faults are real ones: processes are killed. It is not a simulation of many machines: all nodes share one host
name, one /tmp and the loopback interface, so a node knows itself by SLURMD_NODENAME alone.

    start(dir, 8, gpus=8, accounting=True)  -> Testbed; .environment() is what a client needs
    fault(load(dir), "crash", "n3")         -> also from another process: the state is in <dir>/testbed.json
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from outlast.reliability.model import Node, Noun
from outlast.slurm import testbed_boot as booting
from outlast.slurm import testbed_daemons as daemons
from outlast.slurm.errors import SlurmError, TestbedError
from outlast.slurm.testbed_conf import TestbedSpec
from outlast.slurm.testbed_site import Site

DIRECTORY_MAX = 70
"""Unix sockets end at 107 bytes, and there are <directory>/spool/n12/n12_67043328.4294967291."""
FAULTS = ("crash", "kill-slurmd", "start", "drain", "undrain", "kill-slurmctld", "restart-slurmctld")


class Status(Noun, frozen=True, kw_only=True):
    slurm_conf: str
    daemons: dict[str, bool]
    """Name -> is it alive."""
    nodes: dict[str, str]
    """Node -> Slurm's short state; empty where the controller does not answer."""


class Testbed:
    """One cluster in one directory. Every method may be called from another process than the one that started it."""

    __test__ = False  # pytest takes classes named Test* for tests

    def __init__(
        self,
        directory: Path | str,
        *,
        nodes: int = 8,
        gpus: int = 0,
        accounting: bool = True,
        port: int = 0,
        node_timeout_s: int = 5,
        message_timeout_s: int = 3,
        kill_wait_s: int = 3,
        cred_expire_s: int = 5,
        extra_conf: str = "",
    ) -> None:
        """`port` 0: a free block is found. A directory that holds a testbed keeps the settings it was made with."""
        where = check_directory(directory)
        if (where / "testbed.json").exists():
            self._site = Site(where)
            return
        spec = TestbedSpec(
            directory=str(where),
            nodes=nodes,
            gpus=gpus,
            accounting=accounting,
            port=port or booting.find_port_block(3 + nodes),
            host=socket.gethostname().split(".")[0],
            user=getpass.getuser(),
            node_timeout_s=node_timeout_s,
            message_timeout_s=message_timeout_s,
            kill_wait_s=kill_wait_s,
            cred_expire_s=cred_expire_s,
            extra_conf=extra_conf,
        )
        self._site = Site(where, spec)

    @property
    def directory(self) -> Path:
        return self._site.directory

    @property
    def spec(self) -> TestbedSpec:
        return self._site.spec

    @property
    def slurm_conf(self) -> str:
        return self.spec.slurm_conf

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.spec.node_names

    def environment(self) -> dict[str, str]:
        """Enough for every Slurm client."""
        return self._site.environment()

    def run(self, argv: Sequence[str], *, timeout_s: float = 10) -> str:
        """Run a Slurm client against this testbed; its output, or TestbedError with what it said."""
        return self._site.run(argv, timeout_s=timeout_s)

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Start everything that is not running; returns when every node is registered and answers."""
        booting.boot(self._site)

    def stop(self) -> None:
        """Cancel jobs and end all daemons gently; the state is kept for another start()."""
        with contextlib.suppress(SlurmError):
            self.run(["scancel", "-Q", "-u", self.spec.user], timeout_s=5)
            daemons.wait_until(lambda: not self.run(["squeue", "-h", "-o", "%i"], timeout_s=3).strip(), timeout_s=6)
        running = {d.name: d for d in self._site.read().daemons}
        for name, daemon in running.items():
            if name.startswith("slurmd-") or name == "slurmctld":
                daemons.kill(daemon, signal.SIGTERM)
        for name in ("slurmctld", *(f"slurmd-{n}" for n in self.nodes), "slurmdbd", "munged", "mariadbd"):
            if name in running:
                daemons.end(running[name], grace_s=8)
                self._site.forget(name)
        self._sweep()

    def destroy(self) -> None:
        """Kill everything and remove the directory: the quick end of a test."""
        if not (self.directory / "testbed.json").exists():
            return
        kept = self._site.read()
        for daemon in kept.daemons:
            daemons.kill(daemon)
        daemons.wait_until(lambda: not any(daemons.is_alive(d) for d in kept.daemons), timeout_s=5)
        self._sweep()
        if kept.database_dir:
            shutil.rmtree(kept.database_dir, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def reset(self) -> None:
        """Back to idle: no jobs, all daemons up, no drains. Between tests, or after trying a fault."""
        booting.boot(self._site)
        self.run(["scancel", "-Q", "-u", self.spec.user])
        for node, state in booting.node_states(self._site).items():
            if state.startswith(("drain", "drng", "down")):
                self.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"])
        if not daemons.wait_until(self._is_idle, timeout_s=3 + self.spec.kill_wait_s):
            # a process that escaped its step and holds the step's pipes open keeps the node COMPLETING
            self._sweep()
            if not daemons.wait_until(self._is_idle, timeout_s=30):
                raise TestbedError(
                    f"nodes do not become idle: {booting.node_states(self._site)}; destroy it and start anew"
                )

    def _is_idle(self) -> bool:
        return set(booting.node_states(self._site).values()) == {"idle"}

    def status(self) -> Status:
        alive = {d.name: daemons.is_alive(d) for d in self._site.read().daemons}
        return Status(slurm_conf=self.slurm_conf, daemons=alive, nodes=booting.node_states(self._site))

    # ------------------------------------------------------------ faults; a node is 3 or "n3"

    def crash_node(self, node: int | str) -> None:
        """Power loss: slurmd, its step daemons and every process of their jobs end at once, without a word."""
        name = self._name(node)
        slurmd = self._site.daemon(f"slurmd-{name}")
        if slurmd:
            daemons.kill(slurmd)
        # stopped first, so that no step daemon tells anybody how its tasks died
        for pid in daemons.find_stepds(self.directory, [name]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        daemons.kill_all(
            lambda: daemons.with_descendants(
                daemons.find_stepds(self.directory, [name]) | daemons.find_tasks(self.slurm_conf, name)
            )
        )
        self._site.forget(f"slurmd-{name}")

    def kill_slurmd(self, node: int | str) -> None:
        """SIGKILL the node's slurmd alone; its steps run on."""
        self._site.kill(f"slurmd-{self._name(node)}")

    def start_node(self, node: int | str) -> None:
        """Power on again; returns once the controller has heard of it."""
        name = self._name(node)
        booting.start_slurmd(self._site, name)
        self._site.wait_for(f"node {name}", lambda: booting.is_up(booting.node_states(self._site).get(name, "")))

    def kill_slurmctld(self) -> None:
        self._site.kill("slurmctld")

    def restart_slurmctld(self) -> None:
        """Start it again, ending the old one gently if it still runs; returns when it answers."""
        old = self._site.daemon("slurmctld")
        if old and daemons.is_alive(old):
            daemons.end(old, grace_s=8)
        booting.start_slurmctld(self._site)
        self._site.wait_for("slurmctld", lambda: bool(booting.node_states(self._site)))

    def drain(self, node: int | str, reason: str) -> None:
        self.run(["scontrol", "update", f"NodeName={self._name(node)}", "State=DRAIN", f"Reason={reason}"])

    def undrain(self, node: int | str) -> None:
        self.run(["scontrol", "update", f"NodeName={self._name(node)}", "State=RESUME"])

    def _name(self, node: int | str) -> Node:
        name = Node(f"n{node}" if isinstance(node, int) or node.isdigit() else node)
        if name not in self.nodes:
            raise TestbedError(f"no node {name!r} here; this testbed has n1 to n{self.spec.nodes}")
        return name

    def _sweep(self) -> None:
        """Kill step daemons, tasks and srun clients that are still there."""
        slurm_conf = self.slurm_conf
        daemons.kill_all(
            lambda: daemons.with_descendants(
                daemons.find_stepds(self.directory, self.nodes)
                | daemons.find_tasks(slurm_conf)
                | daemons.find_clients(slurm_conf)
            )
        )


def check_directory(directory: Path | str) -> Path:
    """The absolute path; TestbedError where Slurm could not work below it."""
    where = Path(directory).absolute()
    if len(str(where)) > DIRECTORY_MAX:
        raise TestbedError(
            f"{where}: {len(str(where))} characters; Slurm's sockets need a directory of at most {DIRECTORY_MAX}."
            " Choose a shorter one, /tmp/testbed for example"
        )
    return where


def start(directory: Path | str, nodes: int = 8, gpus: int = 0, accounting: bool = True) -> Testbed:
    """A running testbed; on failure everything that was started is ended again, logs are kept."""
    testbed = Testbed(directory, nodes=nodes, gpus=gpus, accounting=accounting)
    made = (testbed.spec.nodes, testbed.spec.gpus, testbed.spec.accounting)
    if made != (nodes, gpus, accounting):
        raise TestbedError(
            f"{directory} holds a testbed of nodes={made[0]} gpus={made[1]} accounting={made[2]}, asked for were"
            f" {nodes}, {gpus}, {accounting}. Destroy it first (`outlast testbed stop`), or ask for what it is"
        )
    try:
        testbed.start()
    except BaseException:
        with contextlib.suppress(SlurmError, OSError):
            testbed.stop()
        raise
    return testbed


def load(directory: Path | str) -> Testbed:
    """The testbed that lives in this directory; TestbedError where there is none."""
    Site(Path(directory).absolute())
    return Testbed(directory)


def fault(testbed: Testbed, kind: str, node: str = "") -> None:
    """One of FAULTS, by name, for the command line."""
    match kind:
        case "crash":
            testbed.crash_node(node)
        case "kill-slurmd":
            testbed.kill_slurmd(node)
        case "start":
            testbed.start_node(node)
        case "drain":
            testbed.drain(node, "testbed fault")
        case "undrain":
            testbed.undrain(node)
        case "kill-slurmctld":
            testbed.kill_slurmctld()
        case "restart-slurmctld":
            testbed.restart_slurmctld()
        case _:
            raise TestbedError(f"no fault {kind!r}; choose one of {', '.join(FAULTS)}")
