"""The agent's end of the warm process: start it, ask it for ranks, hear of their ends.

It runs on the agent's event loop and never waits. What a dead warm process means is the agent's decision.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO

import msgspec

from outlast.launchers.warm_wire import PACKET_BYTES, ForkRank, FromWarm, WarmReady, encoder, warm_decoder

_STDERR_BYTES = 2000


class WarmError(Exception):
    """The warm process cannot be asked: it is gone, or its socket is full. The agent starts another one."""


class WarmClient:
    """One warm process. Start it on the thread that lives as long as the agent: PDEATHSIG follows the thread."""

    def __init__(
        self,
        modules: Sequence[str],
        env: Mapping[str, str],
        *,
        on_message: Callable[[FromWarm], None],
        on_gone: Callable[[str], None],
    ) -> None:
        self._on_message, self._on_gone = on_message, on_gone
        self.ready: WarmReady | None = None
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)
        self._socket.setblocking(False)
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (read when the process has died)
        with theirs:
            words = [
                sys.executable,
                "-P",
                "-m",
                "outlast.launchers.warm",
                str(theirs.fileno()),
                str(os.getpid()),
                *modules,
            ]
            self._process = subprocess.Popen(
                words,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=[theirs.fileno()],
                # not in the agent's group: what kills that must leave this one to clear up
                start_new_session=True,
            )
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._read)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, request: ForkRank, output: int) -> None:
        """Ask for one rank; its output goes to the pipe `output`. WarmError where it cannot be asked."""
        try:
            socket.send_fds(self._socket, [encoder.encode(request)], [output])
        except OSError as e:
            raise WarmError(f"warm process {self.pid}: the request for rank {request.rank} was not taken: {e}") from e

    def close(self, timeout_s: float) -> None:
        """Have it kill all below it and end; KILL it where it does not. Blocks for timeout_s at most, then 1 s."""
        self._stop_reading()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait(1.0)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)

    def _stop_reading(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _read(self) -> None:
        while self._socket.fileno() >= 0:
            try:
                data = self._socket.recv(PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._gone()
                return
            try:
                message = warm_decoder.decode(data)
            except msgspec.MsgspecError:
                continue
            if isinstance(message, WarmReady):
                self.ready = message
            self._on_message(message)

    def _gone(self) -> None:
        self._stop_reading()
        try:
            code: int | None = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.kill()
            code = None
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _STDERR_BYTES))
        said = self._stderr.read().decode(errors="backslashreplace").strip()
        self._stderr.close()
        self._on_gone(f"warm process {self.pid} ended ({code}){': ' + said if said else ''}")
