"""The shelf: a process on each node that keeps parts of local checkpoints, copies them to a peer, and hands them out.

    ranks' writers --parts--> box <--put, get, look-- other nodes' shelves, ranks that restore
                              box --own parts of each committed local checkpoint--> the peer's shelf -> copied-NODE.json

It imports no torch and is nobody's parent. It is off the train loop: what it costs is memory bandwidth and network.
When the peer does not answer, another node takes its place until it does. It listens on the one address that it was
given and answers those alone who prove the run's secret. It ends with the agent that started it.

Run as `python -m outlast.checkpoint.shelf '{...ShelfTask...}'`; the secret is read from its file.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from outlast.checkpoint import shelf_wire as w
from outlast.checkpoint.commit import Reach, pass_by
from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.local_tier import LocalTier, Parts
from outlast.checkpoint.manifest import FileEntry, Manifest
from outlast.checkpoint.shelf_box import Box
from outlast.checkpoint.shelf_link import Channel, welcome
from outlast.checkpoint.shelf_peers import choose_peers
from outlast.checkpoint.shelf_roster import Registration, Roster
from outlast.reliability.model import Node, Noun

log = logging.getLogger(__name__)

LOOK_S: Final = 0.5
AVOID_S: Final = 30.0
"""A peer that did not answer is left alone for so long."""
CALLERS: Final = 16
COPIED_STEPS: Final = 2
"""Of the newest local checkpoints; older ones are not worth a copy any more."""
KILL_AT: Final = "OUTLAST_KILL_SHELF_AT"
POINTS: Final = ("copy.begin", "copy.called", "copy.sent", "copy.noted")


class ShelfTask(Noun, frozen=True, kw_only=True):
    """What a shelf is started with."""

    node: Node
    host: str
    checkpoints: str
    """The run's directory of checkpoints, on the shared file system."""
    box: str
    """This run's directory on this node."""
    roster: str
    secret_file: str
    domain: str = ""
    keep_last: int = 2
    port: int = 0


class Shelf:
    def __init__(self, task: ShelfTask, secret: bytes, *, reach: Reach = pass_by) -> None:
        """`reach` is told each point of a copy that is passed (tests)."""
        self._task, self._secret, self._reach = task, secret, reach
        self.box = Box(Path(task.box))
        self.local = LocalTier(Path(task.checkpoints))
        self.roster = Roster(folder=Path(task.roster), secret=secret, me=task.node)
        self._avoid: dict[tuple[Node, int], float] = {}
        """By node and port: a shelf that was started anew is another one."""
        self._said = ""
        self._listener = socket.create_server((task.host, task.port), backlog=64)
        self._callers = ThreadPoolExecutor(CALLERS, "caller")
        self._open = threading.Semaphore(CALLERS)
        self._stop = threading.Event()
        self._server = threading.Thread(target=self._serve, name="shelf", daemon=True)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def run(self) -> None:
        """Until close()."""
        self.start()
        while not self._stop.wait(LOOK_S):
            self.look()

    def start(self) -> None:
        """Be there for others."""
        self.box.claim()
        self.box.clear_drafts()
        self._server.start()
        task = self._task
        self.roster.register(Registration(node=task.node, host=task.host, port=self.port, domain=task.domain))

    def close(self) -> None:
        self._stop.set()
        self.roster.leave()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._callers.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ own parts to the peer

    def look(self) -> None:
        """One round: what is new is copied, what is old goes. What goes wrong is said, and tried again in the next."""
        try:
            steps = self.local.steps()
            self._tidy(steps)
            for step in reversed(steps[-COPIED_STEPS:]):
                self._copy_one(step)
            self._said = ""
        except (OSError, CheckpointError) as e:
            if str(e) != self._said:
                self._said = str(e)
                log.warning("%s", e)

    def _tidy(self, steps: tuple[int, ...]) -> None:
        if not steps:
            return
        newer = {step for step in self.box.steps() if step > steps[-1]}  # being saved right now
        self.box.keep_only({*steps, *newer})
        if len(steps) > self._task.keep_last and self._is_first(steps[-1]):
            self.local.prune(self._task.keep_last)

    def _is_first(self, train_step: int) -> bool:
        """One node prunes for all: the first that holds a part."""
        _, parts = self.local.read(train_step)
        return self._task.node == min(parts.nodes.values(), default="")

    def _copy_one(self, train_step: int) -> None:
        me = self._task.node
        manifest, parts = self.local.read(train_step)
        mine = parts.of(me)
        if not mine or me in self.local.copies(train_step):
            return
        peer = self._peer()
        if peer is None:
            return
        self._reach("copy.begin")
        try:
            self._send(peer, train_step, manifest, mine)
        except (OSError, CheckpointError) as e:
            self._avoid[peer.node, peer.port] = time.monotonic() + AVOID_S
            raise CheckpointError(f"train_step {train_step}: not copied to node {peer.node}: {e}") from e
        self._reach("copy.sent")
        self._note(train_step, peer.node, manifest, parts)
        self._reach("copy.noted")

    def _peer(self) -> Registration | None:
        """Whom to give a copy now: the ring of all that are thought to be there."""
        now_s, me = time.monotonic(), self._task.node
        known = self.roster.all()
        there = {n: one for n, one in known.items() if n == me or self._avoid.get((n, one.port), 0.0) <= now_s}
        peer = choose_peers({node: one.domain for node, one in there.items()}).get(me)
        return there[peer] if peer is not None else None

    def _send(self, peer: Registration, train_step: int, manifest: Manifest, mine: tuple[str, ...]) -> None:
        with self.roster.call(peer) as channel:
            self._reach("copy.called")
            there = channel.ask(w.Look(train_step=train_step, names=mine))
            known = there.files if isinstance(there, w.Files) else {}
            for name in mine:
                entry = manifest.files[name]
                if known.get(name) == entry:
                    continue
                with self.box.reading(train_step, name) as (size_bytes, pieces):
                    if size_bytes != entry.size_bytes:
                        raise CheckpointError(f"{name}: {size_bytes:,} bytes here, its manifest says otherwise")
                    channel.ask(w.Put(train_step=train_step, name=name, entry=entry), data=pieces)

    def _note(self, train_step: int, peer: Node, manifest: Manifest, parts: Parts) -> None:
        self.local.note_copy(train_step, self._task.node, peer, manifest, parts)
        log.info("train_step %d: this node's parts lie on node %s too", train_step, peer)

    # ------------------------------------------------------------------ callers

    def _serve(self) -> None:
        while not self._stop.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._stop.wait(0.1):  # closed, or too many files are open for the moment
                    return
                continue
            if not self._open.acquire(blocking=False):
                sock.close()  # they come again
                continue
            self._callers.submit(self._talk, sock)

    def _talk(self, sock: socket.socket) -> None:
        try:
            with sock, welcome(sock, self._secret, self._task.node) as channel:
                while (ask := channel.hear_ask()) is not None:
                    self._answer(channel, ask)
        except (OSError, CheckpointError) as e:
            log.info("a connection ended: %s", e)
        except Exception:
            log.exception("a caller could not be served")
        finally:
            self._open.release()

    def _answer(self, channel: Channel, ask: w.Ask) -> None:
        match ask:
            case w.Look(train_step=step, names=names):
                channel.send(w.Files(files=self.box.look(step, names)))
            case w.Get(train_step=step, name=name):
                self._hand_out(channel, step, name)
            case w.Put(train_step=step, name=name, entry=entry):
                self._keep(channel, step, name, entry)

    def _hand_out(self, channel: Channel, train_step: int, name: str) -> None:
        try:
            with self.box.reading(train_step, name) as (size_bytes, pieces):
                channel.send(w.Here(size_bytes=size_bytes))
                channel.send_data(pieces)
        except FileNotFoundError:
            channel.send(w.Refused(why=f"{name} of train_step {train_step} is not here"))

    def _keep(self, channel: Channel, train_step: int, name: str, entry: FileEntry) -> None:
        pieces = channel.hear_data(entry.size_bytes)
        try:
            self.box.put(train_step, name, entry, pieces)
        except w.ShelfError:
            raise  # the caller's fault or end: nothing can be said to it any more
        except (OSError, CheckpointError) as e:
            for _ in pieces:
                pass  # the rest of what is on its way, so that the answer is read
            channel.send(w.Refused(why=str(e)[:2000]))
        else:
            channel.send(w.Kept())


def read_kill_point() -> Reach:
    """For drills: the shelf that passes the point named by OUTLAST_KILL_SHELF_AT ends there, by SIGKILL."""
    point = os.environ.get(KILL_AT, "")

    def reach(passed: str) -> None:
        if passed == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return reach


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    task = msgspec.json.decode(sys.argv[1], type=ShelfTask)
    secret = bytes.fromhex(Path(task.secret_file).read_text().strip())
    shelf = Shelf(task, secret, reach=read_kill_point())
    try:
        shelf.run()
    finally:
        shelf.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
