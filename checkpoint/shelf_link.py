"""A connection between two shelves: shelf_wire's frames over a blocking socket, every wait with an end.

`call` and `welcome` prove the run's secret in both directions before anything else is read. Files pass in pieces and
are never held whole. What is said is shelf.py's and its callers'.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from outlast.checkpoint import shelf_wire as w
from outlast.checkpoint.shelf_wire import ShelfError
from outlast.reliability.model import Node, Noun

CONNECT_S: Final = 5.0
HANDSHAKE_S: Final = 10.0
QUIET_S: Final = 60.0
"""For one read or write; hashing a part on the other side may take a while."""
T = TypeVar("T")


class Channel:
    """One end, proven. Any ShelfError or OSError ends it: close and call anew."""

    def __init__(self, sock: socket.socket, seal: w.Seal, other: Node) -> None:
        self._socket, self._seal, self.other = sock, seal, other

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, said: Noun) -> None:
        payload = w.encode(said)
        if len(payload) > w.MESSAGE_MAX_BYTES:
            raise ShelfError(f"message of {len(payload)} bytes, at most {w.MESSAGE_MAX_BYTES} are sent")
        self._socket.sendall(self._seal.head(w.MESSAGE, payload) + payload)

    def send_data(self, pieces: Iterator[bytes]) -> None:
        for piece in pieces:
            self._socket.sendall(self._seal.head(w.DATA, piece))
            self._socket.sendall(piece)

    def hear_ask(self) -> w.Ask | None:
        """None where the other side has hung up between two."""
        payload = self._hear(w.MESSAGE, may_end=True)
        return None if payload is None else w.decode_ask(payload)

    def ask(self, said: w.Ask, *, data: Iterator[bytes] | None = None) -> w.Reply:
        """The answer. Raises ShelfError for a refusal too."""
        self.send(said)
        if data is not None:
            self.send_data(data)
        reply = w.decode_reply(self._require(w.MESSAGE))
        if isinstance(reply, w.Refused):
            raise ShelfError(f"node {self.other}: {reply.why}")
        return reply

    def hear_data(self, size_bytes: int) -> Iterator[bytes]:
        """Exactly so many bytes."""
        left = size_bytes
        while left:
            piece = self._require(w.DATA)
            if not piece or len(piece) > left:
                raise ShelfError(f"data: found a piece of {len(piece)} bytes, expected 1 to {left}")
            left -= len(piece)
            yield piece

    def _require(self, kind: int) -> bytes:
        payload = self._hear(kind, may_end=False)
        assert payload is not None, "it raises instead"
        return payload

    def _hear(self, kind: int, *, may_end: bool) -> bytes | None:
        head = _read(self._socket, w.HEAD.size, may_end=may_end)
        if not head:
            return None
        payload = _read(self._socket, self._seal.read_head(head, kind))
        self._seal.open(head, payload)
        return payload


def call(address: tuple[str, int], secret: bytes, me: Node, whom: Node, *, quiet_s: float = QUIET_S) -> Channel:
    """A connection to the shelf of this node. ShelfError where nobody answers, or somebody else does."""

    def prove() -> Channel:
        sock = socket.create_connection(address, CONNECT_S)
        try:
            sock.settimeout(HANDSHAKE_S)
            nonce = os.urandom(w.NONCE_BYTES)
            _send(sock, w.Open(protocol=w.PROTOCOL, node=me, nonce=nonce))
            said = w.decode(_receive(sock), w.Challenge)
            if said.node != whom:
                raise ShelfError(f"found the shelf of node {said.node!r}, expected {whom!r}")
            about = (me, said.node, nonce, said.nonce)
            w.check_proof("shelf", said.proof, w.prove(secret, "shelf", *about))
            _send(sock, w.Answer(proof=w.prove(secret, "caller", *about)))
            sock.settimeout(quiet_s)
            return Channel(sock, w.Seal(w.prove(secret, "session", *about), caller=True), whom)
        except BaseException:
            sock.close()
            raise

    return _in_words(f"shelf of node {whom} at {address[0]}:{address[1]}", prove)


def welcome(sock: socket.socket, secret: bytes, me: Node, *, quiet_s: float = QUIET_S) -> Channel:
    """The shelf's end of a new connection. ShelfError where the caller is none of this run's."""

    def prove() -> Channel:
        sock.settimeout(HANDSHAKE_S)
        said = w.decode(_receive(sock), w.Open)
        if said.protocol != w.PROTOCOL:
            raise ShelfError(f"found protocol {said.protocol}, expected {w.PROTOCOL}")
        nonce = os.urandom(w.NONCE_BYTES)
        about = (said.node, me, said.nonce, nonce)
        _send(sock, w.Challenge(node=me, nonce=nonce, proof=w.prove(secret, "shelf", *about)))
        answer = w.decode(_receive(sock), w.Answer)
        w.check_proof("caller", answer.proof, w.prove(secret, "caller", *about))
        sock.settimeout(quiet_s)
        return Channel(sock, w.Seal(w.prove(secret, "session", *about), caller=False), Node(said.node))

    return _in_words("a caller", prove)


def _in_words(whom: str, what: Callable[[], T]) -> T:
    try:
        return what()
    except OSError as e:
        raise ShelfError(f"{whom}: {e}") from e
    except ShelfError as e:
        raise ShelfError(f"{whom}: {e}") from e


def _send(sock: socket.socket, said: Noun) -> None:
    payload = w.encode(said)
    sock.sendall(w.LENGTH.pack(len(payload)) + payload)


def _receive(sock: socket.socket) -> bytes:
    (size_bytes,) = w.LENGTH.unpack(_read(sock, w.LENGTH.size))
    if size_bytes > w.HANDSHAKE_MAX_BYTES:
        raise ShelfError(f"handshake: found {size_bytes} bytes, expected at most {w.HANDSHAKE_MAX_BYTES}")
    return _read(sock, size_bytes)


def _read(sock: socket.socket, size_bytes: int, *, may_end: bool = False) -> bytes:
    data = bytearray(size_bytes)
    view, at = memoryview(data), 0
    while at < size_bytes:
        count = sock.recv_into(view[at:])
        if not count:
            if may_end and at == 0:
                return b""
            raise ShelfError(f"found the end of the stream after {at} of {size_bytes} bytes")
        at += count
    view.release()
    return bytes(data)
