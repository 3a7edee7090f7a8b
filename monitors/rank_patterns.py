"""What a rank prints when it ends: one table, most telling first. Pure data.

Each row is a key (its meaning, blame and action are in reliability/catalog/rank_log.yaml), the class of
docs/vocabulary.md, whether it is an echo of somebody else's end, and the pattern. Patterns hold forms of programs and
libraries, never a site's names. There is no row for `NVRM: Xid`: what a rank prints is a program's word, whatever
it says about hardware.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple


class Pattern(NamedTuple):
    """One way to end."""

    key: str
    class_: str
    echo: bool
    regex: re.Pattern[str]


def _row(key: str, class_: str, pattern: str, *, echo: bool = False) -> Pattern:
    return Pattern(key, class_, echo, re.compile(pattern))


PATTERNS: Final[tuple[Pattern, ...]] = (
    # Megatron's re-run of a train_step, its log lines and the tracker's
    _row("rerun_persistent", "sdc_confirmed", r"Possible persistent error|status=second_rerun_not_reproducible"),
    _row(
        "rerun_same_everywhere",
        "instability",
        r"Correct result \(but possible Application error\)|status=second_rerun_reproducible",
    ),
    _row("rerun_transient", "sdc_suspect", r"Possible transient error|status=first_rerun_not_reproducible"),
    _row(
        "rerun_elsewhere",
        "sdc_suspect",
        r"Got rescheduled on the same GPU|status=first_rerun_reproducible"
        r"|First rerun: unexpected result is reproducible"
        r"|resume the job from the same checkpoint to rerun the last iteration|rerun in place gives the same",
    ),
    _row("rerun_unexpected", "sdc_suspect", r"Unexpected result \S{1,40} on rank|Unexpected result (?:nan|[-+]?inf)\b"),
    _row("local_nan", "sdc_suspect", r"found (?:NaN|Inf) in local (?:grad norm|forward loss)"),
    # the program saw the GPU's memory fail; the kernel log has to bear it out before hardware is blamed
    _row(
        "cuda_ecc",
        "gpu_memory_ue",
        r"uncorrectable ECC error|cudaErrorECCUncorrectable|CUDA_ERROR_ECC_UNCORRECTABLE|cudaErrorContained\b"
        r"|CUDA_ERROR_CONTAINED|[Uu]ncorrectable NVLink error|cudaErrorNvlinkUncorrectable",
    ),
    _row(
        "cuda_lost",
        "gpu_bus_loss",
        r"GPU is lost|CUDA error: (?:the )?device (?:is )?(?:lost|unavailable|not ready)|cudaErrorDevicesUnavailable"
        r"|no CUDA-capable device is detected|Unable to determine the device handle",
    ),
    _row(
        "cuda_oom",
        "app_exception",
        r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError\b|Cuda failure (?:2 )?'out of memory'",
    ),
    _row(
        "cuda_fault",
        "gpu_app_fault",
        r"illegal memory access|device-side assert|misaligned address|illegal instruction was encountered"
        r"|unspecified launch failure|cudaErrorIllegalAddress|cudaErrorAssert|launch timed out and was terminated"
        r"|invalid program counter|an illegal address|block: \[[0-9, ]{1,40}\], thread: \[[0-9, ]{1,40}\] Assertion",
    ),
    _row(
        "cuda_other", "gpu_app_fault", r"CUDA error: |CUDA driver error|CUBLAS_STATUS_|CUDNN_STATUS_|cuda runtime error"
    ),
    # memory of the host
    _row(
        "host_oom",
        "oom_job",
        r"oom[-_]kill event|Out Of Memory|DataLoader worker \(pid[^)]{0,40}\) is killed by signal: Killed"
        r"|DefaultCPUAllocator: can't allocate memory|Cannot allocate memory|^MemoryError\b|std::bad_alloc",
    ),
    _row(
        "shm_full",
        "app_exception",
        r"out of shared memory|insufficient shared memory|is killed by signal: Bus error"
        r"|No space left on device.{0,80}/dev/shm",
    ),
    # collective time-outs: nearly always the waiting side
    _row(
        "collective_timeout",
        "nccl_timeout_victim",
        r"Watchdog caught collective operation timeout|watchdog got stuck for|detected by watchdog at work"
        r"|dump signal due to a collective timeout|Observed flight recorder dump signal|First PG on this rank to signal"
        r"|collective operation timeout|Timed out waiting [0-9]{1,10} ?ms for (?:recv|send|a)"
        r"|Some NCCL operations have failed or timed out|Timeout at NCCL work|no heartbeat of its watchdog"
        r"|ProcessGroupNCCL watchdog hang|we are taking the entire process down"
        r"|store->get\([^()]{0,60}\) got error|reached monitoredBarrier, but received errors"
        r"|[Ww]ait timeout after [0-9]{1,10} ?ms|DistStoreError: Timed out"
        r"|Timed out after [0-9]{1,8} seconds waiting for clients"
        r"|Rank [0-9]{1,6} failed to pass monitoredBarrier|failed to pass monitoredBarrier in [0-9]{1,10} ?ms",
        echo=True,
    ),
    # somebody else's connection ended
    _row(
        "peer_died",
        "peer_died",
        r"Connection (?:closed by (?:remote )?peer|reset by (?:remote )?peer|refused)|Socket closed|Broken pipe"
        r"|recvValue(?:WithTimeout)? failed|sendBytes failed|recvBytes"
        r"|remote process exited or there was a network error"
        r"|ncclRemoteError|Read error \[|Write error \[|connectFullMesh failed|The client socket has|DistNetworkError"
        r"|NCCL WARN \S{0,40} ?(?:Recv|Send|recv|send|Accept|Call to recv|Call to send) .{0,80}(?:failed|closed)",
        echo=True,
    ),
    _row(
        "nccl_net",
        "nccl_net_error",
        r"Got completion (?:from|with)|unhandled system error|ncclSystemError"
        r"|NET/IB ?:.{0,80}(?:error|Error|failed)|ibv_\w{2,30} failed"
        r"|UCX {1,4}ERROR .{0,200}(?:retry count exceeded|[Tt]imed? ?out|unreachable|endpoint)",
    ),
    _row(
        "nccl_internal",
        "nccl_internal",
        r"ncclInternalError|NCCL error.{0,200}internal error|ncclInvalidUsage"
        r"|ncclUnhandledCudaError|unhandled cuda error",
    ),
    # the file system
    _row(
        "filesystem",
        "storage_error",
        r"No space left on device|Disk quota exceeded|Input/output error|Stale file handle|Read-only file system"
        r"|Transport endpoint is not connected|Cannot send after transport endpoint shutdown"
        r"|PytorchStreamWriter failed",
    ),
    _row("crash_nccl", "nccl_internal", r"segfault at .{0,160} in libnccl"),
    _row(
        "crash",
        "app_exception",
        r"Segmentation fault|Fatal Python error|\bSIGSEGV\b|\bSIGABRT\b|\bSIGBUS\b|core dumped|terminate called"
        r"|double free or corruption|stack smashing detected|Illegal instruction$|Bus error$"
        r"|^(?:malloc|realloc|free|munmap_chunk|malloc_consolidate)\(\): |^corrupted (?:size|double-linked list)",
    ),
    _row("interrupted", "app_exception", r"^KeyboardInterrupt\b"),
)

DATA_FRAMES: Final = re.compile(
    r"File \"(?:[^\"\n]{0,300}/)?(?:utils/data/[^\"\n]{0,80}|[^\"/\n]{0,60}(?:dataset|dataloader|data_loader|tokeniz)"
    r"[^\"/\n]{0,60}\.py)\", line "
)
"""Frames of a traceback that read training data."""
DATA_WORDS: Final = re.compile(r"Caught \w{1,60} in DataLoader worker process|DataLoader worker \(pid")
CHECKPOINT_FRAMES: Final = re.compile(
    r"File \"[^\"\n]{0,300}(?:checkpointing|dist_checkpointing|distributed/checkpoint)[^\"\n]{0,120}\""
)

TIMEOUT_RAN: Final = re.compile(r"Timeout\(ms\)=([0-9]{1,12})\) ran for ([0-9]{1,12}) milliseconds")
CULPRIT_FACTOR: Final = 2.0
"""A watchdog that fires this many time-outs late was itself held up: its rank is behind, the others only waited."""
