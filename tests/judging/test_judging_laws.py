"""The laws of judging cases, over generated ones: what convicts nobody, what order and doubling change, any text."""

from __future__ import annotations

import time
from typing import Any

import judging_cases as told
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.reliability.judging.words import DRAINING, VERDICTS, Act

PROGRAM = (13, 31, 32, 43, 45, 68, 69, 137)
HARDWARE = (48, 64, 79, 95, 140, 171)
NODES = [f"n{i}" for i in range(8)]
GPUS = ["0000:19:00", "0000:3b:00", "0000:5e:00"]
RANK_LINES = (
    "KeyError: 'doc_1'",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "torch.OutOfMemoryError: CUDA out of memory.",
    "[rank3]:[E1 01:00:00.1 ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=5, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600021 milliseconds before timing out.",
    "Segmentation fault (core dumped)",
    "RuntimeError: [../gloo/transport/tcp/pair.cc:5] Connection closed by peer [10.0.3.14]:2184",
    " iteration  81/ 500 | elapsed time per iteration (ms): 100.0 | lm loss: nan | grad norm: 1.0 |",
)


def line(second: float, node: str, gpu: str, code: int, pid: int | None = 7) -> dict[str, str]:
    minutes, seconds = divmod(second, 60)
    process = "pid='<unknown>', name=<unknown>" if pid is None else f"pid={pid}, name=p"
    return {
        "t": f"10:{int(minutes):02d}:{seconds:06.3f}",
        "source": f"kernel {node}",
        "text": f"NVRM: Xid (PCI:{gpu}): {code}, {process}, Ch 8",
    }


def said(second: float, rank: int, text: str) -> dict[str, str]:
    return {**line(second, "n", "", 0), "source": f"rank {rank}", "text": text}


def judged(items: list[dict[str, str]]) -> Any:
    return told.judged({"id": "x", "input": items})


seconds = st.floats(0, 50)
pids = st.none() | st.integers(1, 9)
program = st.builds(line, seconds, st.sampled_from(NODES), st.sampled_from(GPUS), st.sampled_from(PROGRAM), pids)
hardware = st.builds(line, seconds, st.sampled_from(NODES), st.sampled_from(GPUS), st.sampled_from(HARDWARE))
rank = st.builds(said, seconds, st.integers(0, 63), st.sampled_from(RANK_LINES))


def in_order(items: list[dict[str, str]]) -> list[dict[str, str]]:
    return sorted(items, key=lambda i: i["t"])


@given(st.lists(program | rank, min_size=1, max_size=12).map(in_order))
def test_application_class_evidence_alone_never_drains(items):
    answer = judged(items)
    assert answer.action not in DRAINING and answer.verdict not in ("hardware_fault", "hardware_suspect")


@given(st.sampled_from(HARDWARE), st.permutations(NODES), st.integers(3, 8), st.lists(program | rank, max_size=5))
def test_nothing_is_drained_when_a_cause_reaches_many_nodes(code, order, many, noise):
    items = [line(i, node, GPUS[0], code) for i, node in enumerate(order[:many])]
    assert judged(in_order([*items, *noise])).action not in DRAINING


@given(st.lists(st.builds(line, seconds, st.just("n1"), st.sampled_from(GPUS), st.sampled_from(HARDWARE)), min_size=1))
def test_a_burst_on_one_node_is_one_incident_and_names_it(items):
    answer = judged(in_order(items))
    assert (answer.action, answer.checks["incidents"]) == (Act.SPARE, 1)
    assert answer.culprit.startswith("n1 ")


@given(st.lists(program | hardware | rank, min_size=1, max_size=8).map(in_order), st.integers(2, 4))
def test_doubled_lines_change_nothing(items, times):
    once, often = judged(items), judged([i for i in items for _ in range(times)])
    assert (once.verdict, once.action, once.culprit) == (often.verdict, often.action, often.culprit)


@given(st.lists(program | hardware, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_the_order_in_which_lines_are_listed_changes_nothing(items, shuffled):
    """Lines have times; a list that is out of order tells the same."""
    other = list(items)
    shuffled.shuffle(other)
    one, two = judged(items), judged(other)
    assert (one.verdict, one.action) == (two.verdict, two.action)


@given(st.lists(hardware | program, min_size=1, max_size=6).map(in_order), st.integers(1, 9))
def test_a_later_day_changes_nothing(items, hours):
    later = [{**i, "t": f"{10 + hours}{i['t'][2:]}"} for i in items]
    one, two = judged(items), judged(later)
    assert (one.verdict, one.action, one.culprit) == (two.verdict, two.action, two.culprit)


@given(st.lists(hardware | program, min_size=1, max_size=6).map(in_order), st.integers(0, 5))
def test_a_lost_line_convicts_no_node_that_was_clear(items, gone):
    rest = [i for n, i in enumerate(items) if n != gone]
    bad = {i["source"].split()[1] for i in items if any(f": {c}," in i["text"] for c in HARDWARE)}
    answer = judged(rest)
    if answer.action in DRAINING:
        assert answer.culprit.split()[0] in bad


NOTES = st.lists(
    st.sampled_from(
        [
            *("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "gpu 3 of n1 is broken, drain n1"),
            *("n1 has bad memory", "Machine Check Exception", "ranks 8-15 on n2 +50%, others flat", "drain all nodes"),
            *("nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Fatal, Link 30 x", "hardware fault of n1"),
            *("uncorrectable ECC error encountered", "status=second_rerun_not_reproducible rank=1 node=n1"),
        ]
    )
    | st.text(max_size=60),
    min_size=1,
    max_size=6,
)


@given(NOTES, st.sampled_from(["fact", "note", "later", "supervisor", "operator", "someone on the phone", "ticket"]))
def test_free_text_convicts_nobody(texts, source):
    answer = judged([{"t": "", "source": source, "text": text} for text in texts])
    assert answer.action not in DRAINING and answer.verdict != "hardware_fault"


@given(st.lists(st.sampled_from([*HARDWARE, *PROGRAM]), min_size=1, max_size=5), st.integers(0, 99))
def test_hardware_words_in_a_ranks_output_convict_nobody(codes, number):
    items = [said(i, number, f"NVRM: Xid (PCI:0000:3b:00): {code}, GPU") for i, code in enumerate(codes)]
    assert judged(items).action not in DRAINING


PIECES = [c["input"] if isinstance(c["input"], str) else "\n".join(i["text"] for i in c["input"]) for c in told.CASES]
WORDS = sorted({word for piece in PIECES for word in piece.split(" ")})
texts = st.text(max_size=200) | st.lists(st.sampled_from(WORDS), max_size=30).map(" ".join) | st.sampled_from(PIECES)
lists = st.lists(
    st.fixed_dictionaries({"t": texts, "source": texts, "text": texts}) | st.dictionaries(texts, texts, max_size=3),
    max_size=5,
)
contexts = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["history", "topology", "domains", "versions", "xid", "text", "t", "x"]), inner
        )
    ),
    max_leaves=8,
)


@given(texts | lists, contexts)
def test_any_text_gets_an_answer(given_input, context):
    answer = told.judged({"id": "x", "input": given_input, "context": context})
    assert answer.verdict in VERDICTS and answer.because.text and answer.action in set(Act)


@pytest.mark.parametrize(
    "text",
    [
        *("|" * 200_000, "[" * 50_000, "iteration 1/2 |" + " a:" * 50_000, "n[" + "1," * 50_000, "rank " * 60_000),
        *("/a_1/ " * 30_000, "a=1 " * 60_000, "0x" * 90_000, "(" * 90_000, "hash dp1 abcd " * 20_000, "\n" * 60_000),
        *("Reason=" * 40_000, "ports " + "10:00 " * 40_000, "ranks 1-2 on n +5% " * 10_000, "nodes 3 " * 30_000),
    ],
)
def test_a_hostile_text_is_judged_in_a_moment(text):
    began_s = time.process_time()
    told.judged({"id": "x", "input": text})
    told.judged({"id": "x", "input": [{"t": text, "source": text, "text": text}]})
    assert time.process_time() - began_s < 5.0


@pytest.mark.parametrize(("nodes", "apart_s"), [(1, 0.1), (1, 100.0), (5000, 0.01), (50, 70.0)])
def test_thousands_of_faults_are_judged_in_a_moment(nodes, apart_s):
    items = [
        {**line(0, f"n{i % nodes}", GPUS[i % 3], HARDWARE[i % 6]), "t": f"+{i * apart_s:.2f}"} for i in range(5500)
    ]
    began_s = time.process_time()
    answer = judged(items)
    assert time.process_time() - began_s < 10.0
    assert answer.checks["gap_reported"]  # more lines than are read
