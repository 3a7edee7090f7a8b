"""One testbed's directory: its settings, the daemons it runs, and how a client reaches it.

All state is in <directory>/testbed.json, so that `outlast testbed fault` acts on a cluster that another process
started.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from outlast.reliability.model import Noun
from outlast.slurm import testbed_daemons as daemons
from outlast.slurm.errors import TestbedError
from outlast.slurm.testbed_conf import TestbedSpec
from outlast.slurm.testbed_daemons import Daemon

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
READY_S = 30.0


class Kept(Noun, frozen=True, kw_only=True):
    """What testbed.json holds."""

    spec: TestbedSpec
    daemons: tuple[Daemon, ...] = ()
    database_dir: str = ""
    """The database lies in memory where it may (a start takes seconds less), so outside the directory."""


class Site:
    """Settings, daemons and clients of one testbed."""

    def __init__(self, directory: Path, spec: TestbedSpec | None = None) -> None:
        self.directory = directory
        self._file = directory / "testbed.json"
        if spec is None and not self._file.exists():
            raise TestbedError(f"no testbed in {directory}; make one with `outlast testbed start --dir {directory}`")
        self.spec = spec or self.read().spec

    def environment(self) -> dict[str, str]:
        """Enough for every Slurm client, and for our daemons: nothing of a surrounding job leaks in."""
        return {
            "PATH": PATH,
            "HOME": os.path.expanduser("~"),
            "USER": self.spec.user,
            "LANG": "C.UTF-8",
            "SLURM_CONF": self.spec.slurm_conf,
        }

    def run(self, argv: Sequence[str], *, timeout_s: float = 10) -> str:
        """Run a program against this testbed; its output, or TestbedError with what it said."""
        words = " ".join(argv)
        try:
            done = subprocess.run(
                list(argv),
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise TestbedError(f"{words}: no answer within {timeout_s:g} s") from None
        except FileNotFoundError:
            raise TestbedError(f"{argv[0]}: not installed here (looked in {PATH})") from None
        if done.returncode:
            said = done.stderr.strip() or done.stdout.strip()
            raise TestbedError(f"{words}: exit code {done.returncode}: {said[-500:]}")
        return done.stdout

    def answers(self, argv: Sequence[str]) -> bool:
        try:
            self.run(argv, timeout_s=5)
        except TestbedError:
            return False
        return True

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Poll until the condition holds; TestbedError with the last log lines where it does not in time."""
        if daemons.wait_until(condition, timeout_s=READY_S):
            return
        logs = sorted((self.directory / "log").glob("*.out"))
        last = "; ".join(f"{p.stem}: {line}" for p in logs for line in p.read_text(errors="replace").splitlines()[-1:])
        raise TestbedError(f"{what}: no answer within {READY_S:g} s; logs are in {self.directory}/log. Last: {last}")

    # ------------------------------------------------------------ daemons, remembered on disk

    def read(self) -> Kept:
        return msgspec.json.decode(self._file.read_bytes(), type=Kept)

    @contextlib.contextmanager
    def changing(self) -> Iterator[list[Kept]]:
        """Read, replace the one element, write: under a lock, since another process may act on the same testbed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            box = [self.read() if self._file.exists() else Kept(spec=self.spec)]
            yield box
            fresh = self._file.with_suffix(".new")
            fresh.write_bytes(msgspec.json.encode(box[0]))
            fresh.replace(self._file)

    def daemon(self, name: str) -> Daemon | None:
        return next((d for d in self.read().daemons if d.name == name), None)

    def ensure(self, name: str, argv: Sequence[str]) -> None:
        """Start this daemon unless it runs."""
        with self.changing() as box:
            if any(d.name == name and daemons.is_alive(d) for d in box[0].daemons):
                return
            others = tuple(d for d in box[0].daemons if d.name != name)
            log = self.directory / "log" / f"{name}.out"
            started = daemons.spawn(name, argv, log=log, env=self.environment())
            box[0] = msgspec.structs.replace(box[0], daemons=(*others, started))

    def forget(self, name: str) -> None:
        with self.changing() as box:
            rest = tuple(d for d in box[0].daemons if d.name != name)
            box[0] = msgspec.structs.replace(box[0], daemons=rest)

    def kill(self, name: str) -> None:
        """SIGKILL this daemon; TestbedError where it does not run."""
        daemon = self.daemon(name)
        if daemon is None or not daemons.is_alive(daemon):
            raise TestbedError(f"{name} is not running in {self.directory}; see `outlast testbed status`")
        daemons.kill(daemon)
        daemons.wait_until(lambda: not daemons.is_alive(daemon), timeout_s=5)
        self.forget(name)
