"""Last words of ranks: captured output of real torch and Megatron-LM runs, and what a hostile log may hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outlast.monitors.rank_log import (
    EXCEPTION_CHARS,
    TAIL_CHARS,
    clean,
    normalise_exception,
    read_last_words,
)
from outlast.monitors.rank_patterns import PATTERNS

DATA = Path(__file__).parent.parent / "data" / "rank_log"

CAPTURED = [
    ("gloo-2.13-chained-exception", "app_exception", "KeyError: 'doc_881'"),
    ("gloo-2.13-peer-killed", "peer_died", ""),
    ("gloo-2.13-peer-raised", "peer_died", ""),
    ("gloo-2.13-peer-asleep", "nccl_timeout_victim", ""),
    ("megatron-0.16.1-rerun-correct-result-exit17", "instability", ""),
    ("megatron-0.16.1-rerun-persistent-other-node-exit17", "sdc_confirmed", ""),
    ("megatron-0.16.1-rerun-same-gpu-exit16", "sdc_suspect", ""),
    ("megatron-0.16.1-rerun-transient-exit17", "sdc_suspect", ""),
    ("megatron-0.16.1-sigterm", "", ""),
    (
        "megatron-0.16.1-truncated-checkpoint",
        "app_exception",
        "CheckpointException: CheckpointException ranks:dict_keys([0, 1])",
    ),
]


@pytest.mark.parametrize(("name", "error_class", "exception"), CAPTURED, ids=[c[0] for c in CAPTURED])
def test_captured_output(name: str, error_class: str, exception: str) -> None:
    words = read_last_words((DATA / f"{name}.txt").read_text())
    assert (words.error_class, words.exception) == (error_class, exception)


TRACE = 'Traceback (most recent call last):\n  File "/home/u/{file}", line 3, in {where}\n    go()\n{raised}\n'


def traced(raised: str, file: str = "train.py", where: str = "main") -> str:
    return "loading\n" + TRACE.format(file=file, where=where, raised=raised)


@pytest.mark.parametrize(
    ("text", "error_class", "exception"),
    [
        (traced("ValueError"), "app_exception", "ValueError"),
        (
            traced("pkg.mod.MyError: at 0x7f00aa11 in /a/b/c.py, pid=77"),
            "app_exception",
            "MyError: at 0x* in c.py, pid=*",
        ),
        (
            traced("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB."),
            "app_exception",
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.",
        ),
        (traced("RuntimeError: CUDA error: uncorrectable ECC error encountered"), "gpu_memory_ue", None),
        (traced("RuntimeError: CUDA error: an illegal memory access was encountered"), "gpu_app_fault", None),
        (traced("UnicodeDecodeError: bad byte", file="gpt_dataset.py", where="__getitem__"), "data_error", None),
        (traced("KeyError: Caught KeyError in DataLoader worker process 0."), "data_error", None),
        (traced("OSError: [Errno 28] No space left on device: '/scratch/x'"), "storage_error", None),
        (traced("RuntimeError: DataLoader worker (pid 81) is killed by signal: Killed."), "oom_job", None),
        (traced("AssertionError: Rank 11: found NaN in local grad norm in backward pass"), "sdc_suspect", None),
        (
            traced("torch.distributed.DistBackendError: NCCL error in: x.cpp:2027, unhandled system error"),
            "nccl_net_error",
            None,
        ),
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=5.0. Some of the step tasks were OOM Killed.",
            "oom_job",
            None,
        ),
        (
            "Fatal Python error: Segmentation fault\n\nCurrent thread 0x01 (most recent call first):",
            "app_exception",
            None,
        ),
        (
            "[E ProcessGroupNCCL.cpp:458] [Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=6, "
            "OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 25625251 milliseconds before timing out.",
            "nccl_timeout_culprit",
            None,
        ),
        (
            "[rank0]:[E321 02:07:08.4 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=1, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600060 milliseconds before timing out.",
            "nccl_timeout_victim",
            None,
        ),
        ("iteration 5\nNVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n", "", None),
        ("kernel: NVRM: Xid (PCI:0000:3b:00): 79\n" + traced("ValueError: x"), "app_exception", "ValueError: x"),
        ("", "", ""),
    ],
)
def test_kinds_of_end(text: str, error_class: str, exception: str | None) -> None:
    words = read_last_words(text)
    assert words.error_class == error_class
    if exception is not None:
        assert words.exception == exception


def test_a_program_survives_an_early_exception_and_dies_of_the_last() -> None:
    text = (
        traced("NVMLError_LibraryNotFound: NVML Shared Library Not Found") + "step 1\n" * 500 + traced("KeyError: 'a'")
    )
    assert read_last_words(text).exception == "KeyError: 'a'"


def test_a_launchers_wrapper_does_not_hide_the_cause() -> None:
    text = traced("KeyError: 'a'") + traced("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:")
    assert read_last_words(text).exception == "KeyError: 'a'"


def test_a_librarys_fatal_line_beats_the_echo_that_follows_it() -> None:
    text = "CUDA error: uncorrectable ECC error encountered\n" + traced(
        "RuntimeError: [x/pair.cc:5] Connection closed by peer"
    )
    words = read_last_words(text)
    assert (words.error_class, words.echo) == ("gpu_memory_ue", False)


def test_terminal_codes_and_html_are_taken_out() -> None:
    text = (
        "\x1b[31m<b>Traceback (most recent call last):</b>\x1b[0m\n  File x\n\x1b]0;title\x07KeyError: '<pad>'\u202e\n"
    )
    words = read_last_words(text)
    assert words.exception == "KeyError: '<pad>'"
    assert clean("\x1b[2J<script src=x>hi</script>\x00") == "hi"


def test_the_same_error_reads_the_same_everywhere() -> None:
    one = "OSError: /lustre/a/b.bin at 0x7fab12 from 10.0.0.4:2912 (pid 81)"
    two = "OSError: /scratch/z/b.bin at 0x55aa99 from 10.0.9.9:33 (pid 9)"
    assert normalise_exception(one) == normalise_exception(two)


def test_keys_are_unique() -> None:
    keys = [p.key for p in PATTERNS]
    assert len(keys) == len(set(keys))


PIECES = st.sampled_from(
    [
        *(
            "Traceback (most recent call last):",
            "Traceback (most recent call last): (RANK 0)",
            "  File x",
            "KeyError: 'a'",
        ),
        *(
            "During handling of the above exception",
            "CUDA error: ",
            "Connection closed by peer",
            "\x1b[31m",
            "<script>",
        ),
        *("[rank1]: ", "ran for 9 milliseconds", "Timeout(ms)=1) ran for 99999 milliseconds", "a.b.C", "\n", "/" * 40),
    ]
)


@given(
    st.one_of(st.text(), st.lists(PIECES, max_size=60).map("\n".join), st.binary().map(lambda b: b.decode("latin-1")))
)
@example("/a" * 40000)
@example("[" * 70000)
@example("1.2.3." * 20000)
@example("a." * 40000)
def test_no_text_raises(text: str) -> None:
    words = read_last_words(text)
    assert len(words.exception) <= EXCEPTION_CHARS
    assert len(clean(text)) <= TAIL_CHARS
