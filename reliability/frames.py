"""The agent link's frames: bytes in, messages out, and back. Pure -- no sockets, no clock, no randomness.

    agent                                                   supervisor
      | -- open: node, epoch it looks for, nonce a  ------------> |
      | <- challenge: epoch, nonce s, proof(secret, "supervisor")  |
      | -- answer: proof(secret, "agent") -----------------------> |
      | == sealed frames, both ways: length seq MAC payload ====== |

A proof is HMAC-SHA256 with the per-run secret over role, protocol, node, epoch and both nonces, so the secret never
crosses the wire, an old proof answers no new nonce, and one side's proof is worthless in the other's mouth. The
session key is made the same way, with a role word of its own. Each sealed frame carries a MAC over direction,
sequence and payload: what is replayed, reflected, reordered or changed does not open.

Nothing here trusts a length before it has been compared with a limit, and after the first thing that is wrong a side
stays closed: the caller drops the connection. Nonces are arguments: fresh random bytes, from whoever owns the socket.
"""

from __future__ import annotations

import hmac
import struct
from abc import ABC, abstractmethod
from enum import StrEnum
from typing import Annotated, Final, Generic, TypeVar

import msgspec

from outlast.reliability.model import Node, Noun
from outlast.reliability.wire import FromAgent, FromSupervisor

PROTOCOL: Final = 1
NONCE_BYTES: Final = 32
SECRET_BYTES: Final = 32
MAX_PAYLOAD_BYTES: Final = 4 * 1024 * 1024
MAX_HANDSHAKE_BYTES: Final = 4 * 1024

_LENGTH: Final = struct.Struct(">I")
_SEALED: Final = struct.Struct(">IQ16s")
_MAC_BYTES: Final = 16
_BY_AGENT: Final = b"A"
_BY_SUPERVISOR: Final = b"S"

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Proof = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]

In = TypeVar("In")
Out = TypeVar("Out")
Shake = TypeVar("Shake", bound=Noun)


class FrameError(Exception):
    """The peer is not who it should be, or did not say what it should. The connection is to be closed.

    `before` holds the messages that were whole and right before the fault, in the same piece of input.
    """

    def __init__(self, where: str, *, found: str, expected: str) -> None:
        super().__init__(f"{where}: found {found}, expected {expected}; the connection is to be closed")
        self.where, self.found, self.expected = where, found, expected
        self.before: tuple[object, ...] = ()


class Phase(StrEnum):
    OPENING = "opening"
    PROVING = "proving"
    READY = "ready"
    CLOSED = "closed"


class _Open(Noun, frozen=True, kw_only=True, tag="open"):
    protocol: int
    node: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    epoch: int
    nonce: Nonce


class _Challenge(Noun, frozen=True, kw_only=True, tag="challenge"):
    epoch: int
    nonce: Nonce
    proof: Proof


class _Answer(Noun, frozen=True, kw_only=True, tag="answer"):
    proof: Proof


def parse_secret(text: str) -> bytes:
    """The per-run secret from its file's text: 64 hexadecimal digits. ValueError says what is wrong, never the text."""
    word = text.strip()
    try:
        secret = bytes.fromhex(word)
    except ValueError:
        raise ValueError("secret: found something else than hexadecimal digits, expected 64 of them") from None
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"secret: found {len(word)} characters, expected {2 * SECRET_BYTES} hexadecimal digits")
    return secret


class _Side(ABC, Generic[In, Out]):
    """What both sides share: cutting the stream into frames, sealing and opening them."""

    def __init__(
        self, *, secret: bytes, nonce: bytes, sends: bytes, hears: bytes, decoder: msgspec.msgpack.Decoder[In]
    ):
        if len(secret) < 16 or len(nonce) != NONCE_BYTES:
            raise ValueError(f"expected a secret of at least 16 bytes and a nonce of {NONCE_BYTES}")
        self.phase = Phase.OPENING
        self._secret, self._nonce, self._key = secret, nonce, b""
        self._sends, self._hears, self._decoder = sends, hears, decoder
        self._sent = self._received = 0
        self._buffer = bytearray()
        self._outgoing = bytearray()

    @property
    def ready(self) -> bool:
        """Both sides have proven the secret."""
        return self.phase is Phase.READY

    def outgoing(self) -> bytes:
        """Bytes of the handshake that are to be written now; b'' where there are none."""
        data = bytes(self._outgoing)
        self._outgoing.clear()
        return data

    def send(self, message: Out) -> bytes:
        """One sealed frame. FrameError before the handshake is over, and for what is too large or cannot be encoded."""
        if not self.ready:
            raise FrameError("send", found=f"a connection that is {self.phase}", expected="a finished handshake")
        try:
            payload = _ENCODER.encode(message)
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
            raise FrameError("send", found=_short(error), expected="a message that can be encoded") from error
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise FrameError("send", found=f"{len(payload)} bytes", expected=f"at most {MAX_PAYLOAD_BYTES}")
        sequence, self._sent = self._sent, self._sent + 1
        return _SEALED.pack(len(payload), sequence, self._mac(self._sends, sequence, payload)) + payload

    def receive(self, data: bytes) -> list[In]:
        """The messages that these bytes complete, oldest first. FrameError closes this side for good."""
        if self.phase is Phase.CLOSED:
            raise FrameError("receive", found="a connection that is closed", expected="a new one")
        self._buffer += data
        messages: list[In] = []
        try:
            while (payload := self._cut()) is not None:
                if self.phase is Phase.READY:
                    messages.append(self._decode(payload))
                else:
                    self._shake(payload)
        except FrameError as error:
            error.before = tuple(messages)
            self._close()
            raise
        return messages

    def end(self) -> None:
        """The peer closed the stream. FrameError where it did so inside the handshake or inside a frame."""
        was, left = self.phase, len(self._buffer)
        self._close()
        if was in (Phase.OPENING, Phase.PROVING):
            raise FrameError("end of stream", found=f"a handshake that is {was}", expected="a finished one")
        if left:
            raise FrameError("end of stream", found=f"{left} bytes of an unfinished frame", expected="whole frames")

    def _close(self) -> None:
        self.phase = Phase.CLOSED
        self._buffer = bytearray()
        self._outgoing.clear()
        self._key = b""

    def _cut(self) -> bytes | None:
        """The payload of the next whole frame; None where more bytes are needed."""
        if len(self._buffer) < _LENGTH.size:
            return None
        sealed = self.phase is Phase.READY
        size_bytes: int = _LENGTH.unpack_from(self._buffer)[0]
        limit = MAX_PAYLOAD_BYTES if sealed else MAX_HANDSHAKE_BYTES
        if size_bytes > limit:
            what = "frame" if sealed else "handshake"
            raise FrameError(f"{what} length", found=f"{size_bytes} bytes", expected=f"at most {limit}")
        head = _SEALED.size if sealed else _LENGTH.size
        if len(self._buffer) < head + size_bytes:
            return None
        with memoryview(self._buffer) as view:
            payload = bytes(view[head : head + size_bytes])
        if sealed:
            self._open(payload)
        del self._buffer[: head + size_bytes]
        return payload

    def _open(self, payload: bytes) -> None:
        _, sequence, mac = _SEALED.unpack_from(self._buffer)
        if sequence != self._received:
            raise FrameError("frame sequence", found=str(sequence), expected=str(self._received))
        if not hmac.compare_digest(mac, self._mac(self._hears, sequence, payload)):
            raise FrameError("frame MAC", found="one that does not fit", expected="one made with this session's key")
        self._received += 1

    def _mac(self, direction: bytes, sequence: int, payload: bytes) -> bytes:
        sealed = direction + sequence.to_bytes(8, "big") + payload
        return hmac.digest(self._key, sealed, "sha256")[:_MAC_BYTES]

    def _decode(self, payload: bytes) -> In:
        try:
            return self._decoder.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise FrameError("message", found=_short(error), expected="a message of this protocol") from error

    def _prove(self, role: str, node: str, epoch: int, by_agent: bytes, by_supervisor: bytes) -> bytes:
        # MessagePack of a tuple, since joined strings can be read in two ways
        words = ("outlast agent link", PROTOCOL, role, node, epoch, by_agent, by_supervisor)
        return hmac.digest(self._secret, _ENCODER.encode(words), "sha256")

    def _check(self, role: str, proof: bytes, expected: bytes) -> None:
        if not hmac.compare_digest(proof, expected):
            raise FrameError(f"proof of the {role}", found="one that does not fit", expected="this run's secret")

    @abstractmethod
    def _shake(self, payload: bytes) -> None:
        """Take the peer's next message of the handshake. FrameError ends it."""


class AgentSide(_Side[FromSupervisor, FromAgent]):
    """The agent's end: it opens, and believes a supervisor of exactly the epoch that it looked for."""

    def __init__(self, *, secret: bytes, node: Node, epoch: int, nonce: bytes) -> None:
        super().__init__(secret=secret, nonce=nonce, sends=_BY_AGENT, hears=_BY_SUPERVISOR, decoder=_FROM_SUPERVISOR)
        self.node, self.epoch = node, epoch
        self._outgoing += _wrap(_Open(protocol=PROTOCOL, node=node, epoch=epoch, nonce=nonce))
        self.phase = Phase.PROVING

    def _shake(self, payload: bytes) -> None:
        said = _read(_CHALLENGE, payload)
        if said.epoch != self.epoch:
            raise FrameError("challenge", found=f"epoch {said.epoch}", expected=f"epoch {self.epoch}")
        about = (self.node, self.epoch, self._nonce, said.nonce)
        self._check("supervisor", said.proof, self._prove("supervisor", *about))
        self._outgoing += _wrap(_Answer(proof=self._prove("agent", *about)))
        self._key = self._prove("session", *about)
        self.phase = Phase.READY


class SupervisorSide(_Side[FromAgent, FromSupervisor]):
    """The supervisor's end: `node` is whom it talks to, and is true once `ready`."""

    def __init__(self, *, secret: bytes, epoch: int, nonce: bytes) -> None:
        super().__init__(secret=secret, nonce=nonce, sends=_BY_SUPERVISOR, hears=_BY_AGENT, decoder=_FROM_AGENT)
        self.epoch = epoch
        self.node = Node("")
        self._their_nonce = b""

    def _shake(self, payload: bytes) -> None:
        if self.phase is Phase.OPENING:
            self._challenge(_read(_OPEN, payload))
            return
        about = (self.node, self.epoch, self._their_nonce, self._nonce)
        self._check("agent", _read(_ANSWER, payload).proof, self._prove("agent", *about))
        self._key = self._prove("session", *about)
        self.phase = Phase.READY

    def _challenge(self, said: _Open) -> None:
        if said.protocol != PROTOCOL:
            raise FrameError("open", found=f"protocol {said.protocol}", expected=f"protocol {PROTOCOL}")
        if said.epoch != self.epoch:
            raise FrameError("open", found=f"an agent that looks for epoch {said.epoch}", expected=f"{self.epoch}")
        self.node, self._their_nonce = Node(said.node), said.nonce
        proof = self._prove("supervisor", said.node, self.epoch, said.nonce, self._nonce)
        self._outgoing += _wrap(_Challenge(epoch=self.epoch, nonce=self._nonce, proof=proof))
        self.phase = Phase.PROVING


def _wrap(said: Noun) -> bytes:
    payload = _ENCODER.encode(said)
    return _LENGTH.pack(len(payload)) + payload


def _read(decoder: msgspec.msgpack.Decoder[Shake], payload: bytes) -> Shake:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError("handshake", found=_short(error), expected="a handshake of this protocol") from error


def _short(error: Exception) -> str:
    """An error's text, bounded, since it may quote what an unknown peer sent."""
    return repr(str(error)[:200])


_ENCODER: Final = msgspec.msgpack.Encoder()
_FROM_AGENT: Final[msgspec.msgpack.Decoder[FromAgent]] = msgspec.msgpack.Decoder(FromAgent)
_FROM_SUPERVISOR: Final[msgspec.msgpack.Decoder[FromSupervisor]] = msgspec.msgpack.Decoder(FromSupervisor)
_OPEN: Final = msgspec.msgpack.Decoder(_Open)
_CHALLENGE: Final = msgspec.msgpack.Decoder(_Challenge)
_ANSWER: Final = msgspec.msgpack.Decoder(_Answer)
