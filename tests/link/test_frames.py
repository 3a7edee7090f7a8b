"""Frames and handshake: two honest sides understand each other whatever the pieces; anything else is a clean error."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.reliability.frames import (
    MAX_HANDSHAKE_BYTES,
    MAX_PAYLOAD_BYTES,
    AgentSide,
    FrameError,
    Phase,
    SupervisorSide,
    parse_secret,
)
from outlast.reliability.model import JobId, Node, SourceBlind
from outlast.reliability.wire import Beat, Done, FromAgent, FromSupervisor, Heard, Hello, Leave, Pulse, Welcome

SECRET = b"s" * 32
HELLO = Hello(node=Node("n1"), job=JobId("7"), incarnation="i", pid=1, address="127.0.0.1", attempt=0, highest_epoch=3)


def agent(secret: bytes = SECRET, epoch: int = 3, nonce: bytes = b"a" * 32) -> AgentSide:
    return AgentSide(secret=secret, node=Node("n1"), epoch=epoch, nonce=nonce)


def supervisor(secret: bytes = SECRET, epoch: int = 3, nonce: bytes = b"b" * 32) -> SupervisorSide:
    return SupervisorSide(secret=secret, epoch=epoch, nonce=nonce)


def meet(one: AgentSide, other: SupervisorSide) -> None:
    assert other.receive(one.outgoing()) == []
    assert one.receive(other.outgoing()) == []
    assert other.receive(one.outgoing()) == []
    assert one.ready and other.ready


def pair() -> tuple[AgentSide, SupervisorSide]:
    one, other = agent(), supervisor()
    meet(one, other)
    return one, other


def pieces(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    at = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(at)]


def heard(number: int) -> Heard:
    return Heard(number=number, signal=SourceBlind(node=Node("n1"), at_s=1.0, source="kmsg", why="x" * number))


FROM_AGENT = st.lists(
    st.one_of(
        st.builds(Done, command=st.integers(0, 2**40), ok=st.booleans(), why=st.text(max_size=50)),
        st.builds(Beat, attempt=st.integers(0, 99), state=st.sampled_from(["idle", "running"])),
        st.integers(1, 300).map(heard),
    ),
    max_size=6,
)
FROM_SUPERVISOR = st.lists(
    st.one_of(
        st.builds(Leave, command=st.integers(0, 99), why=st.text(max_size=50)),
        st.builds(Pulse, epoch=st.just(3), heard=st.integers(0, 9), steps_through=st.just(1), roster=st.just(())),
    ),
    max_size=6,
)


@pytest.mark.slow
@settings(deadline=None)
@given(FROM_AGENT, FROM_SUPERVISOR, st.lists(st.integers(0, 10_000), max_size=12))
def test_messages_arrive_whole_and_in_order_whatever_the_pieces(
    up: list[FromAgent], down: list[FromSupervisor], cuts: list[int]
) -> None:
    one, other = agent(), supervisor()
    stream, back = one.outgoing(), b""
    for piece in pieces(stream, cuts):
        assert other.receive(piece) == []
    for piece in pieces(other.outgoing(), cuts):
        assert one.receive(piece) == []
    # the agent may speak right behind its answer
    stream = one.outgoing() + b"".join(one.send(m) for m in up)
    got = [m for piece in pieces(stream, cuts) for m in other.receive(piece)]
    assert got == up
    back = b"".join(other.send(m) for m in down)
    assert [m for piece in pieces(back, cuts) for m in one.receive(piece)] == down
    assert other.node == "n1"
    one.end()
    other.end()


def test_the_secret_never_crosses_the_wire() -> None:
    one, other = agent(), supervisor()
    said = [one.outgoing()]
    other.receive(said[-1])
    said.append(other.outgoing())
    one.receive(said[-1])
    said.append(one.outgoing())
    other.receive(said[-1])
    said.append(one.send(HELLO))
    assert not any(SECRET in s for s in said)


def test_a_wrong_secret_is_refused_by_either_side() -> None:
    one, other = agent(secret=b"x" * 32), supervisor()
    other.receive(one.outgoing())
    with pytest.raises(FrameError, match="proof of the supervisor: found one that does not fit, expected this run's"):
        one.receive(other.outgoing())
    # an agent that does not mind who the supervisor is, still has to prove itself
    intruder, honest = agent(secret=b"x" * 32), supervisor()
    shadow = supervisor(secret=b"x" * 32)
    opening = intruder.outgoing()
    honest.receive(opening)
    shadow.receive(opening)
    intruder.receive(shadow.outgoing())
    with pytest.raises(FrameError, match="proof of the agent"):
        honest.receive(intruder.outgoing())
    assert honest.phase is Phase.CLOSED and not honest.ready


def test_an_old_handshake_answers_no_new_nonce() -> None:
    one, other = agent(), supervisor()
    opening = one.outgoing()
    other.receive(opening)
    one.receive(other.outgoing())
    answer = one.outgoing()
    again = supervisor(nonce=b"c" * 32)
    again.receive(opening)
    with pytest.raises(FrameError, match="proof of the agent"):
        again.receive(answer)


def test_another_node_name_or_epoch_spoils_the_proof() -> None:
    one, other = agent(), supervisor()
    other.receive(one.outgoing())
    one.receive(other.outgoing())
    answer = one.outgoing()
    forged = supervisor()
    forged.receive(AgentSide(secret=SECRET, node=Node("n2"), epoch=3, nonce=b"a" * 32).outgoing())
    with pytest.raises(FrameError, match="proof of the agent"):
        forged.receive(answer)
    with pytest.raises(FrameError, match="open: found an agent that looks for epoch 2, expected 3"):
        supervisor().receive(agent(epoch=2).outgoing())


def test_reflected_frames_do_not_open() -> None:
    one, other = pair()
    with pytest.raises(FrameError, match="frame MAC"):
        one.receive(one.send(HELLO))
    with pytest.raises(FrameError, match="frame MAC"):
        other.receive(other.send(Welcome(epoch=3, heard=0)))
    fresh = agent()
    with pytest.raises(FrameError, match="handshake"):
        fresh.receive(fresh.outgoing())


def test_replayed_dropped_and_reordered_frames_are_out_of_sequence() -> None:
    one, other = pair()
    first, second = one.send(HELLO), one.send(heard(1))
    assert other.receive(first) == [HELLO]
    with pytest.raises(FrameError, match="frame sequence: found 0, expected 1"):
        other.receive(first)
    one, other = pair()
    first, second = one.send(HELLO), one.send(heard(1))
    with pytest.raises(FrameError, match="frame sequence: found 1, expected 0"):
        other.receive(second)


def test_a_frame_of_another_session_does_not_open() -> None:
    one, _ = pair()
    later, other = agent(nonce=b"d" * 32), supervisor(nonce=b"e" * 32)
    meet(later, other)
    with pytest.raises(FrameError, match="frame MAC"):
        other.receive(one.send(HELLO))


def test_what_was_right_before_the_fault_is_kept() -> None:
    one, other = pair()
    good = one.send(HELLO)
    with pytest.raises(FrameError) as caught:
        other.receive(good + b"\xff" * 40)
    assert caught.value.before == (HELLO,)
    with pytest.raises(FrameError, match="closed"):
        other.receive(b"")
    with pytest.raises(FrameError, match="closed"):
        other.send(Welcome(epoch=3, heard=0))


def test_lengths_are_refused_before_anything_is_kept() -> None:
    with pytest.raises(FrameError, match=f"handshake length: found {MAX_HANDSHAKE_BYTES + 1} bytes, expected at most"):
        supervisor().receive(struct.pack(">I", MAX_HANDSHAKE_BYTES + 1))
    one, other = pair()
    with pytest.raises(FrameError, match="frame length"):
        other.receive(struct.pack(">I", MAX_PAYLOAD_BYTES + 1))
    with pytest.raises(FrameError, match="send: found 419"):
        one.send(Done(command=1, ok=False, why="x" * MAX_PAYLOAD_BYTES))
    assert one.ready  # what could not be sent has not broken the stream
    assert supervisor().receive(b"") == []


def test_a_largest_frame_passes() -> None:
    one, other = pair()
    big = Done(command=1, ok=False, why="x" * (MAX_PAYLOAD_BYTES - 100))
    assert other.receive(one.send(big)) == [big]


def test_text_that_cannot_be_encoded_is_an_error_of_the_message_only() -> None:
    one, other = pair()
    with pytest.raises(FrameError, match="can be encoded"):
        one.send(Done(command=1, ok=False, why="\udcff"))
    assert other.receive(one.send(HELLO)) == [HELLO]


def test_a_stream_that_ends_early_says_where() -> None:
    one, other = pair()
    other.receive(one.send(HELLO)[:-1])
    with pytest.raises(FrameError, match=r"end of stream: found .* bytes of an unfinished frame"):
        other.end()
    with pytest.raises(FrameError, match="a handshake that is opening"):
        supervisor().end()


@settings(deadline=None)
@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
def test_garbage_before_the_handshake_is_an_error_or_nothing(data: bytes, cuts: list[int]) -> None:
    for side in (supervisor(), agent()):
        try:
            for piece in pieces(data, cuts):
                assert side.receive(piece) == []
        except FrameError:
            assert side.phase is Phase.CLOSED
        assert not side.ready
        assert len(side._buffer) <= len(data) and len(side._buffer) < MAX_HANDSHAKE_BYTES + 4


@settings(deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_garbage_with_an_honest_frame_round_it_is_an_error_or_nothing(data: bytes, framed: bool) -> None:
    one, other = pair()
    if framed:
        data = struct.pack(">IQ", len(data), 0) + b"m" * 16 + data
    with pytest.raises(FrameError):
        other.receive(data + b"\0" * MAX_PAYLOAD_BYTES + b"\xff" * 28)
    assert one.ready


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
            lambda inner: (
                st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.just("type"), inner, max_size=4)
            ),
            max_leaves=12,
        ).map(msgspec.msgpack.encode),
        st.sampled_from([b"\x91" * 5_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]),
        st.sampled_from(["hello", "beat", "heard", "done"]).map(lambda t: msgspec.msgpack.encode({"type": t})),
    )
)
def test_an_honest_seal_on_a_nonsense_message_is_a_clean_error(payload: bytes) -> None:
    one, other = pair()
    seal = struct.pack(">IQ16s", len(payload), 0, one._mac(b"A", 0, payload))
    try:
        messages = other.receive(seal + payload)
    except FrameError as error:
        assert error.where == "message" and len(str(error)) < 600
    else:
        assert len(messages) == 1


@settings(deadline=None)
@given(st.data())
def test_any_changed_byte_closes_the_connection(data: st.DataObject) -> None:
    one, other = pair()
    frame = bytearray(one.send(heard(5)) + one.send(heard(6)))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    got: list[object] = []
    with pytest.raises(FrameError):
        try:
            got = list(other.receive(bytes(frame)))
            other.end()
        except FrameError as error:
            got = list(error.before)
            raise
    assert got in ([], [heard(5)])


def test_parse_secret() -> None:
    assert parse_secret("ab" * 32 + "\n") == b"\xab" * 32
    for text in ("", "ab", "zz" * 32, "é" * 64):
        with pytest.raises(ValueError, match="expected") as caught:
            parse_secret(text)
        assert not text or text not in str(caught.value)
