"""The testbed's configuration files as text. Pure: settings in, text out; files and processes are elsewhere.

One host plays every part, so each node is a slurmd of its own port, spool and name on 127.0.0.1, and a GPU is a link to
/dev/null (gres.conf wants a device file; a link to one is enough and needs no root). Time-outs are far shorter than any
site would choose: a test must not wait two minutes for a requeue.
"""

from __future__ import annotations

from typing import Final

from outlast.reliability.model import Node, Noun

CLUSTER = "outlast_testbed"
"""Slurm's name of the cluster: by it a testbed is told from a site."""
PARTITION = "train"
GPU_TYPE = "sim"


class TestbedSpec(Noun, frozen=True, kw_only=True):
    """Everything that makes one testbed what it is; stored with it."""

    __test__ = False  # pytest takes classes named Test* for tests

    directory: str
    nodes: int = 8
    gpus: int = 0
    accounting: bool = True
    port: int
    """First of a block of free ports: slurmctld, slurmdbd, MariaDB, then one for each node."""
    host: str
    """This host's short name: slurmctld refuses to start under another."""
    user: str
    cpus: int = 16
    """CPUs that each node claims; more than there are (SlurmdParameters=config_overrides)."""
    memory_mb: int = 65536
    node_timeout_s: int = 5
    """SlurmdTimeout: with message_timeout_s it decides how soon a dead node is DOWN (about 13 s with 5 and 3)."""
    message_timeout_s: int = 3
    kill_wait_s: int = 3
    cred_expire_s: int = 5
    """A requeued job starts no sooner than this + 1 s."""
    extra_conf: str = ""
    """Appended to slurm.conf; the later of two equal keys wins."""

    @property
    def slurm_conf(self) -> str:
        return f"{self.directory}/etc/slurm.conf"

    @property
    def munge_socket(self) -> str:
        return f"{self.directory}/run/munge.socket"

    @property
    def database_port(self) -> int:
        return self.port + 2

    @property
    def ports(self) -> int:
        """How many ports from `port` on are used."""
        return 3 + self.nodes

    @property
    def node_names(self) -> tuple[Node, ...]:
        return tuple(Node(f"n{i}") for i in range(1, self.nodes + 1))


Pairs = list[tuple[str, str]]

_EVERYWHERE: Final[Pairs] = [
    ("AuthType", "auth/munge"),
    ("CredType", "cred/munge"),
    ("CommunicationParameters", "NoInAddrAny,NoCtldInAddrAny"),
    ("LogTimeFormat", "iso8601_ms"),
    ("MailProg", "/bin/true"),
    ("MpiDefault", "none"),
    ("SwitchType", "switch/none"),
    ("ProctrackType", "proctrack/linuxproc"),
    ("TaskPlugin", "task/none"),
    ("JobAcctGatherType", "jobacct_gather/none"),
    ("SelectType", "select/cons_tres"),
    ("SelectTypeParameters", "CR_CPU"),
    ("SchedulerType", "sched/backfill"),
    ("SchedulerParameters", "sched_interval=2,sched_min_interval=0,batch_sched_delay=0,bf_interval=2"),
    ("TCPTimeout", "1"),
    ("SlurmctldTimeout", "10"),
    ("BatchStartTimeout", "5"),
    ("InactiveLimit", "0"),
    ("WaitTime", "0"),
    ("MinJobAge", "600"),
    ("KillOnBadExit", "0"),
    ("JobRequeue", "1"),
    ("ReturnToService", "1"),
    ("TreeWidth", "65533"),
    ("SlurmdParameters", "config_overrides"),
    ("GresTypes", "gpu"),
]
"""What is the same for every testbed.

CommunicationParameters keeps the daemons on loopback; proctrack/linuxproc and no task plugin: no cgroups, hence no
root; intervals are short, so that a test sees the scheduler act.
"""


def render_slurm_conf(spec: TestbedSpec) -> str:
    """slurm.conf; comments there would only repeat what the manual says, so reasons stand here."""
    pairs = [*_daemons(spec), *_waits(spec), *_EVERYWHERE, *_accounting(spec)]
    lines = [f"{key}={value}" for key, value in pairs]
    return "\n".join([*lines, *_nodes(spec), spec.extra_conf, ""])


def _daemons(spec: TestbedSpec) -> Pairs:
    """Who they are and where their files lie."""
    where = spec.directory
    return [
        ("ClusterName", CLUSTER),
        ("SlurmctldHost", f"{spec.host}(127.0.0.1)"),
        ("SlurmctldPort", str(spec.port)),
        ("SlurmUser", spec.user),
        ("SlurmdUser", spec.user),
        ("AuthInfo", f"socket={spec.munge_socket},cred_expire={spec.cred_expire_s}"),
        ("StateSaveLocation", f"{where}/state"),
        ("SlurmdSpoolDir", f"{where}/spool/%n"),
        ("SlurmctldPidFile", f"{where}/run/slurmctld.self"),
        ("SlurmdPidFile", f"{where}/run/slurmd-%n.self"),
        ("SlurmctldLogFile", f"{where}/log/slurmctld.log"),
        ("SlurmdLogFile", f"{where}/log/slurmd-%n.log"),
    ]


def _waits(spec: TestbedSpec) -> Pairs:
    return [
        ("SlurmdTimeout", str(spec.node_timeout_s)),
        ("MessageTimeout", str(spec.message_timeout_s)),
        ("UnkillableStepTimeout", str(5 * spec.message_timeout_s)),
        ("KillWait", str(spec.kill_wait_s)),
    ]


def _accounting(spec: TestbedSpec) -> Pairs:
    """AccountingStoragePass is how a client of slurmdbd learns the socket of our own munged."""
    if not spec.accounting:
        return [("AccountingStorageType", "accounting_storage/none"), ("JobCompType", "jobcomp/none")]
    return [
        ("AccountingStorageType", "accounting_storage/slurmdbd"),
        ("AccountingStorageHost", "127.0.0.1"),
        ("AccountingStoragePort", str(spec.port + 1)),
        ("AccountingStoragePass", spec.munge_socket),
        ("AccountingStoreFlags", "job_comment"),
        ("AccountingStorageTRES", "gres/gpu"),
    ]


def _nodes(spec: TestbedSpec) -> list[str]:
    first = spec.port + 3
    gres = f" Gres=gpu:{GPU_TYPE}:{spec.gpus}" if spec.gpus else ""
    nodes = [
        f"NodeName={node} NodeHostname={spec.host} NodeAddr=127.0.0.1 Port={first + i} CPUs={spec.cpus}"
        f" RealMemory={spec.memory_mb}{gres} State=UNKNOWN"
        for i, node in enumerate(spec.node_names)
    ]
    return [*nodes, f"PartitionName={PARTITION} Nodes=ALL Default=YES MaxTime=INFINITE State=UP"]


def render_gres_conf(spec: TestbedSpec) -> str:
    """gres.conf; empty where the nodes have no GPUs."""
    return "".join(
        f"NodeName={node} Name=gpu Type={GPU_TYPE} File={spec.directory}/dev/gpu{gpu}\n"
        for node in spec.node_names
        for gpu in range(spec.gpus)
    )


def render_slurmdbd_conf(spec: TestbedSpec, password: str) -> str:
    """slurmdbd.conf, which holds the database password: write it 0600 (slurmdbd refuses anything wider)."""
    pairs = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={spec.munge_socket}",
        "CommunicationParameters": "NoInAddrAny",
        "DbdHost": spec.host,
        "DbdAddr": "127.0.0.1",
        "DbdPort": str(spec.port + 1),
        "SlurmUser": spec.user,
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "127.0.0.1",
        "StoragePort": str(spec.database_port),
        "StorageUser": "slurm",
        "StoragePass": password,
        "StorageLoc": "slurm_acct_db",
        "LogFile": f"{spec.directory}/log/slurmdbd.log",
        "PidFile": f"{spec.directory}/run/slurmdbd.self",
    }
    return "".join(f"{key}={value}\n" for key, value in pairs.items())


def render_database_init(password: str) -> str:
    """SQL that MariaDB runs at each start; idempotent."""
    return (
        "CREATE DATABASE IF NOT EXISTS slurm_acct_db;\n"
        f"CREATE OR REPLACE USER 'slurm'@'127.0.0.1' IDENTIFIED BY '{password}';\n"
        "GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';\n"
    )


def render_database_client(spec: TestbedSpec, password: str) -> str:
    """A client's option file, so that the password is on no command line."""
    return f"[client]\nhost=127.0.0.1\nport={spec.database_port}\nuser=slurm\npassword={password}\n"


def needs_cgroup_conf(version: str) -> bool:
    """From 23.11 on slurmd wants a cgroup plugin unless told otherwise. `version` as `slurmd -V` prints it."""
    numbers = version.split()[-1].split(".")[:2] if version.split() else []
    return len(numbers) == 2 and all(n.isdigit() for n in numbers) and (int(numbers[0]), int(numbers[1])) >= (23, 11)
