"""RUN.yaml as data: what a user asks for. Pure; reading, overrides and messages are in config.py.

Durations are read by config.py from `90s`, `20min`, `7d` or a plain number of seconds and stored in seconds.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from outlast.reliability.model import Noun

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Task(Noun, frozen=True, kw_only=True):
    """What is run, unmodified. Exactly one of script, module, command."""

    script: str = ""
    """A Python file; forked from a process that has already imported torch."""
    module: str = ""
    """A Python module, as `python -m`; `outlast.launchers.trainer` is the reference trainer."""
    command: tuple[str, ...] = ()
    """Any program; supervised by exit code, output and heartbeat."""
    args: tuple[str, ...] = ()
    """Words given to it after the parameters."""
    kind: str = "auto"
    """auto | reference | megatron_lm | plain: which adapter gives it layout, checkpoint and restore flags."""
    env: dict[str, str] = msgspec.field(default_factory=dict)
    container: str = ""
    """Container image for srun --container-image; its digest is recorded and checked at every restart."""
    workdir: str = ""
    """'' : where `outlast` was called."""
    preload: tuple[str, ...] = ()
    """Modules imported once an agent before ranks are forked; () : what the kind needs."""


class Cluster(Noun, frozen=True, kw_only=True):
    """Where it runs."""

    kind: str = "slurm"
    """slurm | local (each node a process group on this machine)"""
    partition: str = ""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    nodes: Positive = 1
    """Nodes that train when all is well."""
    nodes_min: Count = 0
    """Shrink no further than this; 0 means `nodes`: never shrink."""
    spares: Count = 0
    gpus_per_node: Count = 0
    """GPUs to ask the scheduler for; 0 where the ranks use the CPU."""
    ranks_per_node: Count = 0
    """0 means gpus_per_node."""
    walltime_s: Seconds = 0.0
    """0: the partition's default."""
    sbatch_args: tuple[str, ...] = ()
    """More words for sbatch, as they are."""
    kernel_log: str = "/dev/kmsg"
    """Read on each node for XID lines; %n is the node's name. '' : none."""
    accept_user_facility: bool = False
    """Testbeds only: believe kernel log lines that user space wrote."""
    exporter: str = ""
    """A dcgm-exporter's page, fetched by each node's agent: `local` (port 9400 of the node itself) or a URL, in which
    %n is the node's name. '' : none."""
    policy: str = ""
    """A file of the site's own rows of the catalogue, taken into the run when it is frozen. '' : what OUTLAST_POLICY
    names, else /etc/outlast/policy.yaml where there is one; none: the catalogue as it is."""
    feed: bool = True
    """Ask Slurm for replacements when nodes are lost."""


class LayoutAsked(Noun, frozen=True, kw_only=True):
    tp: Positive = 1
    pp: Positive = 1
    cp: Positive = 1
    ep: Positive = 1
    may_change: tuple[str, ...] = ("dp",)
    """Which of dp, tp, pp, ep, cp may become smaller when nodes are lost. dp is what is left over."""
    global_batch: Positive = 8
    """Samples a train_step, kept over every change of layout."""
    micro_batch: Positive = 1


class Checkpoint(Noun, frozen=True, kw_only=True):
    dir: str = ""
    """'' : checkpoints/ in the run directory."""
    every_steps: Count = 0
    """0 where `every_s` is given."""
    every_s: Seconds = 0.0
    auto: bool = False
    """The interval follows what saves cost and how often attempts fail; every_steps is then the first attempt's.
    Written as `every: auto`."""
    every_min_s: Seconds = 30.0
    """An interval that follows is never shorter ..."""
    every_max_s: Seconds = 3600.0
    """... nor longer: no more than this is lost."""
    end_margin_s: Seconds = 60.0
    """Before an allocation ends, the last save begins this long, and a save's own time, earlier; 0: never."""
    keep_last: Positive = 3
    keep_every: Count = 0
    """Beside the newest, the first at or after each multiple of so many train_steps stays; 0: none."""


class Tiers(Noun, frozen=True, kw_only=True):
    """Where checkpoints are kept beside `checkpoint.dir`: nearer (the nodes themselves) and farther."""

    local_dir: str = ""
    """A directory of each node's own, in memory or on NVMe, such as /dev/shm/outlast; '' : no local checkpoints."""
    local_every_steps: Count = 0
    """Local checkpoints between the shared ones, in train_steps."""
    local_keep_last: Positive = 2
    remote_url: str = ""
    """Where durable checkpoints are copied to, as fsspec names it: s3://bucket/prefix or file:///path; '' : nowhere."""
    remote_every: Positive = 1
    """Every how many durable checkpoints one is copied."""
    remote_keep_last: Positive = 5


class Limits(Noun, frozen=True, kw_only=True):
    """What bounds every automatic act."""

    attempts_without_progress: Positive = 3
    """Then hold and page."""
    drains_per_hour: Count = 2
    wait_for_spare_s: Seconds = 300.0
    """Then train on with fewer nodes."""
    start_timeout_s: Seconds = 600.0
    """From starting the ranks to the first finished train_step."""
    hang_floor_s: Seconds = 60.0
    """A train_step is not called stuck before this, nor before 3 x its usual p99."""
    silent_s: Seconds = 1800.0
    """For programs without step records: no output for this long is no progress."""
    agent_silent_s: Seconds = 15.0
    lease_s: Seconds = 20.0
    """Agents call a supervisor lost after this silence and start a successor."""
    term_grace_s: Seconds = 10.0
    kill_grace_s: Seconds = 10.0
    gate_timeout_s: Seconds = 60.0
    settle_s: Seconds = 0.5
    """After a rank's death, wait this long for the kernel's word before blaming the program."""
    hold_max_s: Seconds = 86400.0
    """A held run gives its allocation back after this."""
    log_bytes_per_rank: Positive = 64 * 1024 * 1024


class Notify(Noun, frozen=True, kw_only=True):
    webhook_file: str = ""
    """A file (0600) that holds the URL; never the URL itself."""


class RunFile(Noun, frozen=True, kw_only=True):
    """One RUN.yaml, frozen with the run."""

    name: Name
    task: Task
    params: dict[str, str | int | float | bool | None] = msgspec.field(default_factory=dict)
    """Arguments of the program: `lr: 3e-3` becomes `--lr 3e-3`; true is a bare flag, false and null leave it out."""
    cluster: Cluster = Cluster()
    layout: LayoutAsked = LayoutAsked()
    train_steps: Count = 0
    """The target: the run is finished when this train_step is; 0 where the program's exit 0 says so."""
    checkpoint: Checkpoint = Checkpoint()
    tiers: Tiers = Tiers()
    limits: Limits = Limits()
    notify: Notify = Notify()
    run_root: str = "runs"
    """Directory of run directories, on a file system that all nodes see."""

    @property
    def ranks_per_node(self) -> int:
        return self.cluster.ranks_per_node or self.cluster.gpus_per_node or 1

    @property
    def nodes_min(self) -> int:
        return self.cluster.nodes_min or self.cluster.nodes
