"""Bringing a testbed up: programs that must be there, files, the database, then the daemons in order.

slurmdbd before slurmctld, and the database before slurmdbd: a slurmctld that never saw its slurmdbd refuses to start.
Making the database is the slowest part, so it lies in memory (/dev/shm) where that can be written.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import socket
import tempfile
from pathlib import Path

import msgspec

from outlast.reliability.model import Node
from outlast.slurm import testbed_conf as conf
from outlast.slurm.errors import TestbedError
from outlast.slurm.testbed_site import PATH, Site

PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sinfo": "slurm-client",
    "munged": "munge",
    "munge": "munge",
}
"""Program -> Debian package."""
ACCOUNTING_PROGRAMS = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "mariadb": "mariadb-client",
}
INSTALL = (
    "apt-get install --no-install-recommends slurm-wlm slurm-wlm-basic-plugins slurm-wlm-mysql-plugin slurmdbd munge"
    " mariadb-server"
)


def boot(site: Site) -> None:
    """Start everything that is not running; returns when every node is registered and answers."""
    require_programs(accounting=site.spec.accounting)
    _write_files(site)
    if site.spec.accounting:
        _start_database(site)
    _start_munged(site)
    if site.spec.accounting:
        _start_slurmdbd(site)
    start_slurmctld(site)
    for node in site.spec.node_names:
        start_slurmd(site, node)
    site.wait_for("slurmctld and all nodes", lambda: _all_up(site))


def require_programs(*, accounting: bool, path: str = PATH) -> None:
    """TestbedError that names the Debian packages where a program is missing."""
    wanted = PROGRAMS | (ACCOUNTING_PROGRAMS if accounting else {})
    missing = [program for program in wanted if shutil.which(program, path=path) is None]
    if missing:
        packages = ", ".join(sorted({wanted[p] for p in missing}))
        raise TestbedError(f"not installed: {', '.join(missing)} (Debian packages {packages}). Install with: {INSTALL}")


def find_port_block(size: int) -> int:
    """First of `size` consecutive TCP ports that nobody uses just now, below the kernel's range for outgoing ones."""
    for _ in range(200):
        first = random.randrange(10_000, 32_000 - size)
        if all(_is_free(port) for port in range(first, first + size)):
            return first
    raise TestbedError(f"no {size} free ports in a row between 10000 and 32000 found in 200 tries; give port= yourself")


def start_slurmctld(site: Site) -> None:
    site.ensure("slurmctld", ["slurmctld", "-D", "-f", site.spec.slurm_conf])


def start_slurmd(site: Site, node: Node) -> None:
    (site.directory / "spool" / node).mkdir(exist_ok=True)
    site.ensure(f"slurmd-{node}", ["slurmd", "-D", "-N", node, "-f", site.spec.slurm_conf])


def node_states(site: Site) -> dict[str, str]:
    """Node -> sinfo's short state; empty where the controller does not answer."""
    try:
        lines = site.run(["sinfo", "-h", "-N", "-o", "%N %t"], timeout_s=5).splitlines()
    except TestbedError:
        return {}
    return {name: state for name, _, state in (line.strip().partition(" ") for line in lines) if name}


def is_up(short_state: str) -> bool:
    """A node that is registered and answers, drained or not."""
    return bool(short_state) and not short_state.endswith("*") and short_state not in ("unk", "down", "fail", "futr")


def _all_up(site: Site) -> bool:
    states = node_states(site)
    return all(is_up(states.get(node, "")) for node in site.spec.node_names)


def _write_files(site: Site) -> None:
    with site.changing():
        pass  # the settings are on disk before anything runs
    for part in ("etc", "run", "log", "state", "spool", "dev"):
        (site.directory / part).mkdir(exist_ok=True)
    for gpu in range(site.spec.gpus):
        with contextlib.suppress(FileExistsError):
            (site.directory / "dev" / f"gpu{gpu}").symlink_to("/dev/null")
    etc = site.directory / "etc"
    (etc / "slurm.conf").write_text(conf.render_slurm_conf(site.spec))
    (etc / "gres.conf").write_text(conf.render_gres_conf(site.spec))
    if conf.needs_cgroup_conf(site.run(["slurmd", "-V"])):
        (etc / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
    if not (etc / "munge.key").exists():
        _write_secret(etc / "munge.key", secrets.token_bytes(128))
    if site.spec.accounting and not (etc / "slurmdbd.conf").exists():
        password = secrets.token_hex(16)
        _write_secret(etc / "database.sql", conf.render_database_init(password).encode())
        _write_secret(etc / "database.cnf", conf.render_database_client(site.spec, password).encode())
        _write_secret(etc / "slurmdbd.conf", conf.render_slurmdbd_conf(site.spec, password).encode())


def _start_munged(site: Site) -> None:
    where, socket_path = site.directory, site.spec.munge_socket
    argv = ["munged", "--foreground", "--force", f"--key-file={where}/etc/munge.key", f"--socket={socket_path}"]
    argv += [f"--pid-file={where}/run/munged.self", f"--log-file={where}/log/munged.log"]
    site.ensure("munged", [*argv, f"--seed-file={where}/run/munge.seed"])
    site.wait_for("munged", lambda: site.answers(["munge", "-n", "-S", socket_path]))


def _start_database(site: Site) -> None:
    where = site.directory
    # nothing here need survive the host, so nothing waits for a disk
    quick = ["--innodb-log-file-size=8M", "--innodb-flush-method=nosync"]
    quick += ["--user=root"] if os.getuid() == 0 else []
    data = site.read().database_dir or _make_database(site, quick)
    argv = ["mariadbd", "--no-defaults", f"--datadir={data}", f"--socket={where}/run/mysql.sock", *quick]
    argv += [f"--pid-file={where}/run/mariadbd.self", f"--init-file={where}/etc/database.sql"]
    argv += ["--bind-address=127.0.0.1", f"--port={site.spec.database_port}", "--skip-name-resolve"]
    argv += ["--skip-log-bin", "--performance-schema=OFF", "--innodb-buffer-pool-size=32M"]
    site.ensure("mariadbd", [*argv, "--innodb-lock-wait-timeout=900"])


def _make_database(site: Site, quick: list[str]) -> str:
    inside = "/dev/shm" if os.access("/dev/shm", os.W_OK) else str(site.directory)
    data = tempfile.mkdtemp(prefix="outlast-testbed-", dir=inside)
    argv = ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--skip-test-db", "--skip-name-resolve", *quick]
    try:
        site.run([*argv, "--auth-root-authentication-method=normal"], timeout_s=120)
    except TestbedError:
        shutil.rmtree(data, ignore_errors=True)
        raise
    with site.changing() as box:
        box[0] = msgspec.structs.replace(box[0], database_dir=data)
    return data


def _start_slurmdbd(site: Site) -> None:
    client = ["mariadb", f"--defaults-file={site.directory}/etc/database.cnf", "-e", "use slurm_acct_db"]
    site.wait_for("mariadbd", lambda: site.answers(client))
    # it takes no -f: it reads slurmdbd.conf beside $SLURM_CONF
    site.ensure("slurmdbd", ["slurmdbd", "-D"])
    site.wait_for("slurmdbd", lambda: site.answers(["sacctmgr", "-n", "list", "cluster"]))
    if conf.CLUSTER not in site.run(["sacctmgr", "-nP", "list", "cluster", "format=cluster"]).split():
        site.run(["sacctmgr", "-i", "add", "cluster", conf.CLUSTER])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _write_secret(path: Path, content: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
