"""What shelves say to each other: a proof in both directions, then sealed messages and pieces of files. Pure.

    caller                                          shelf
      | -- open: node, nonce a -----------------------> |
      | <- challenge: node, nonce s, proof("shelf") --- |
      | -- answer: proof("caller") -------------------> |
      | == sealed both ways: length kind seq MAC payload |

As on the agent link, a proof is HMAC-SHA256 with the run's secret over role, nodes and both nonces: the secret never
crosses the wire, nothing old fits, and one side's proof is worthless in the other's mouth. Each frame carries a MAC
over direction, sequence, kind and payload. No length is believed before it was compared with a limit. Sockets and
nonces are shelf_link's.
"""

from __future__ import annotations

import hmac
import struct
from typing import Annotated, Final, TypeVar

import msgspec

from outlast.checkpoint.errors import CheckpointError
from outlast.checkpoint.manifest import FileEntry, Step, unsafe_path
from outlast.reliability.model import Noun

PROTOCOL: Final = 1
NONCE_BYTES: Final = 32
SECRET_BYTES: Final = 16
"""At least."""
HANDSHAKE_MAX_BYTES: Final = 4096
MESSAGE_MAX_BYTES: Final = 4 << 20
DATA_MAX_BYTES: Final = 1 << 20
LENGTH: Final = struct.Struct(">I")
HEAD: Final = struct.Struct(">IBQ16s")
MESSAGE: Final = 1
DATA: Final = 2
_MAC_BYTES: Final = 16

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Proof = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Said = TypeVar("Said", bound=Noun)


class ShelfError(CheckpointError):
    """A shelf did not answer, is not one of this run's, or said what it should not. The connection is to be closed."""


class Open(Noun, frozen=True, kw_only=True, tag="open"):
    protocol: int
    node: Name
    nonce: Nonce


class Challenge(Noun, frozen=True, kw_only=True, tag="challenge"):
    node: Name
    nonce: Nonce
    proof: Proof


class Answer(Noun, frozen=True, kw_only=True, tag="answer"):
    proof: Proof


class Put(Noun, frozen=True, kw_only=True, tag="put"):
    """Keep this file; its bytes follow. Answered by Kept."""

    train_step: Step
    name: Name
    entry: FileEntry


class Get(Noun, frozen=True, kw_only=True, tag="get"):
    """Answered by Here, and then the bytes."""

    train_step: Step
    name: Name


class Look(Noun, frozen=True, kw_only=True, tag="look"):
    """What is there of a checkpoint, read through and hashed. Answered by Files."""

    train_step: Step
    names: tuple[Name, ...]


class Kept(Noun, frozen=True, kw_only=True, tag="kept"):
    pass


class Here(Noun, frozen=True, kw_only=True, tag="here"):
    size_bytes: Annotated[int, msgspec.Meta(ge=0)]


class Files(Noun, frozen=True, kw_only=True, tag="files"):
    files: dict[str, FileEntry]


class Refused(Noun, frozen=True, kw_only=True, tag="refused"):
    why: Annotated[str, msgspec.Meta(max_length=2000)]


Ask = Put | Get | Look
Reply = Kept | Here | Files | Refused


def prove(secret: bytes, role: str, caller: str, shelf: str, by_caller: bytes, by_shelf: bytes) -> bytes:
    # MessagePack of a tuple, since joined strings can be read in two ways
    words = ("outlast shelf", PROTOCOL, role, caller, shelf, by_caller, by_shelf)
    return hmac.digest(secret, _ENCODER.encode(words), "sha256")


def check_proof(role: str, proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise ShelfError(f"proof of the {role}: found one that does not fit, expected this run's secret")


def encode(said: Noun) -> bytes:
    return _ENCODER.encode(said)


def decode(payload: bytes, what: type[Said]) -> Said:
    """A message of the handshake."""
    try:
        return msgspec.msgpack.decode(payload, type=what)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise ShelfError(f"handshake: found {str(e)[:200]!r}, expected {what.__name__}") from e


def decode_ask(payload: bytes) -> Ask:
    ask = _decode(_ASK, payload)
    for name in (ask.name,) if not isinstance(ask, Look) else ask.names:
        if why := unsafe_name(name):
            raise ShelfError(f"file name {name[:80]!r} {why}; nothing was opened")
    return ask


def decode_reply(payload: bytes) -> Reply:
    return _decode(_REPLY, payload)


Any_ = TypeVar("Any_")


def _decode(decoder: msgspec.msgpack.Decoder[Any_], payload: bytes) -> Any_:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise ShelfError(f"message: found {str(e)[:200]!r}, expected one of this protocol") from e


def unsafe_name(name: str) -> str:
    """'' for a plain file name that a shelf may hold; else why not."""
    if "/" in name or name.startswith("."):
        return "has a '/' or begins with a dot"
    return unsafe_path(name)


class Seal:
    """One side's sealing and opening, after the proofs."""

    def __init__(self, key: bytes, *, caller: bool) -> None:
        self._key = key
        self._sends, self._hears = (b"C", b"S") if caller else (b"S", b"C")
        self._sent = self._received = 0

    def head(self, kind: int, payload: bytes | memoryview) -> bytes:
        """What stands before this payload on the wire."""
        sequence, self._sent = self._sent, self._sent + 1
        return HEAD.pack(len(payload), kind, sequence, self._mac(self._sends, sequence, kind, payload))

    def read_head(self, head: bytes, kind: int) -> int:
        """How many bytes follow. Raises before anything of that size is read."""
        size_bytes, found, _, _ = HEAD.unpack(head)
        limit = MESSAGE_MAX_BYTES if kind == MESSAGE else DATA_MAX_BYTES
        if found != kind or size_bytes > limit:
            raise ShelfError(f"frame: found kind {found} of {size_bytes} bytes, expected kind {kind}, at most {limit}")
        return int(size_bytes)

    def open(self, head: bytes, payload: bytes | memoryview) -> None:
        _, kind, sequence, mac = HEAD.unpack(head)
        expected = self._mac(self._hears, self._received, kind, payload)
        if sequence != self._received or not hmac.compare_digest(mac, expected):
            raise ShelfError(
                f"frame {self._received}: found a sequence or MAC that does not fit, expected the next one"
            )
        self._received += 1

    def _mac(self, direction: bytes, sequence: int, kind: int, payload: bytes | memoryview) -> bytes:
        mac = hmac.new(self._key, direction + sequence.to_bytes(8, "big") + bytes((kind,)), "sha256")
        mac.update(payload)
        return mac.digest()[:_MAC_BYTES]


_ENCODER: Final = msgspec.msgpack.Encoder()
_ASK: Final[msgspec.msgpack.Decoder[Ask]] = msgspec.msgpack.Decoder(Ask)
_REPLY: Final[msgspec.msgpack.Decoder[Reply]] = msgspec.msgpack.Decoder(Reply)
