"""What an agent and its warm process say to each other: message types over a SOCK_SEQPACKET pair. Data only.

One message a packet, MessagePack; a ForkRank carries one file descriptor, the write end of the rank's output pipe.
"""

from __future__ import annotations

from typing import Final

import msgspec

from outlast.reliability.model import Noun

PACKET_BYTES: Final = 4 * 1024 * 1024
"""Room for the environment of a rank, many times over."""


class ForkRank(Noun, frozen=True, kw_only=True, tag="fork_rank"):
    """agent -> warm: start one rank."""

    attempt: int
    rank: int
    kind: str
    """script | module | command"""
    target: str
    """Script path, module name, or '' for a command."""
    argv: tuple[str, ...]
    env: dict[str, str]
    """The whole environment."""
    workdir: str


class WarmReady(Noun, frozen=True, kw_only=True, tag="warm_ready"):
    """warm -> agent: imports are done."""

    import_s: float
    threads: int
    """More than 1: something imported has started threads, which a fork does not copy."""
    failed: tuple[str, ...] = ()
    """Preloads that did not import; the ranks will meet the same error and show it in their own output."""


class RankForked(Noun, frozen=True, kw_only=True, tag="rank_forked"):
    attempt: int
    rank: int
    pid: int
    start_ticks: int


class ForkFailed(Noun, frozen=True, kw_only=True, tag="fork_failed"):
    attempt: int
    rank: int
    why: str


class RankEnded(Noun, frozen=True, kw_only=True, tag="rank_ended"):
    """The rank's process was reaped. status: its exit code, or minus the POSIX signal that ended it."""

    attempt: int
    rank: int
    pid: int
    status: int


FromWarm = WarmReady | RankForked | ForkFailed | RankEnded

encoder: Final = msgspec.msgpack.Encoder()
fork_decoder: Final = msgspec.msgpack.Decoder(ForkRank)
warm_decoder: Final[msgspec.msgpack.Decoder[FromWarm]] = msgspec.msgpack.Decoder(FromWarm)
