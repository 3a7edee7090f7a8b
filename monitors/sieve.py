"""Which lines of a large text can matter at all: a literal of some pattern stands in them. Pure, and quick.

Nearly all lines of a kernel log or a training log are nobody's business. Looking for each literal over a whole chunk
costs far less than looking at each line, since most literals do not occur in it at all. A line that is sieved out
could not have been read (a test holds this over the tables); one that passes may still be none of ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

CHUNK_BYTES: Final = 1 << 18
LINE_BYTES: Final = 1 << 16
"""A longer line is cut: no reader looks further."""

NEEDLES: Final[tuple[bytes, ...]] = tuple(
    word.encode()
    for word in (
        # the NVIDIA driver and its tools
        *("Xid", "fallen off", "NV", "nvid", "nvlink", "DCGM", "dcgm_", "GPU", "| ", "MMU Fault", "Fault is of"),
        *(
            "Remapp",
            "Pending",
            "Uncorrect",
            "Bit ECC",
            "Threshold",
            "Slowdown",
            "o devices were",
            "device handle",
            "UVM driver",
        ),
        *("Current ", "Max  ", "mismatch", "LnkSta", "downgraded", "PCIe"),
        # "error" of every kind: of PCIe, memory, disks, file systems, Python, NCCL, Slurm
        *("rror", "xception", "ailed", "atal"),
        # PCIe, memory, CPU
        *(
            "AER",
            "severity",
            ":    [",
            "TLP Header",
            "Slot(",
            "EDAC",
            "emory",
            "oft offlin",
            "emperature",
            "Machine",
            "oom",
        ),
        *("BUG", "atchdog", "rcu", "blocked for", "panic", "Oops", "eneral protection", "egfault", "trap", "libnccl"),
        # network, file systems, disks
        *(
            "mlx",
            "DPC: ",
            "nvme",
            "BERT",
            "ink is ",
            "ink down",
            "ink up",
            "imed out",
            "imeout",
            "Lustre",
            "not responding",
            "tale ",
        ),
        *("nfs: ", "nfs4: ", "mmfs", "GPFS", "Disk failure", "emounting", "orruption", " I/O", "controller is down"),
        # jobs
        *("CUDA", "cuda", "NCCL", "teration ", "Ranks with", "Rtt", "ffected ranks", "status=", "onnection ", "slurm"),
        *("srun: ", "NODE_", " DUE TO ", "dump", "egmentation", "roken pipe", "ocket", "nexpected result", "rerun"),
        *(
            "orrect result",
            " in local ",
            "terminate called",
            "KeyboardInt",
            "recvV",
            "Got completion",
            "monitoredBarrier",
        ),
        *("Traceback", "SIG", "smashing", "bad_alloc", "ut Of Mem", "quota", "o space left", "llegal"),
        *("launch failure", "misaligned", "device-side", "CUBLAS", "CUDNN", "ncclInv", "is killed by", "ransport end"),
        *("ead-only file", "taking the entire", "UCX", "alloc(): ", "free(): ", "_chunk(): ", "idate(): ", "orrupted "),
        *(
            "exitcode",
            "exits with return",
            "failure of node",
            "ailed node",
            "from batch node",
            "reempted job",
            "noticed that process",
            "MPI_ABORT",
            "ailed (exit",
            "got signal",
            "] Assertion",
        ),
        # as a collector may have rewritten it: in another case, or its message as numbers
        *("xid", "XID", '"MESSAGE":[', '"MESSAGE": [', '"MESSAGE" : ['),
    )
)


def marked(chunk: bytes) -> set[int]:
    """Offsets at which the lines begin that hold a literal."""
    starts: set[int] = set()
    for needle in NEEDLES:
        at = chunk.find(needle)
        while at >= 0:
            starts.add(chunk.rfind(b"\n", 0, at) + 1)
            end = chunk.find(b"\n", at)
            if end < 0:
                break
            at = chunk.find(needle, end)
    return starts


def whole_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes, cut after line ends; a line without end is cut at LINE_BYTES and the rest of it dropped."""
    rest = b""
    skipping = False
    for chunk in chunks:
        if skipping:
            end = chunk.find(b"\n")
            if end < 0:
                continue
            chunk, skipping = chunk[end + 1 :], False
        data = rest + chunk
        cut = data.rfind(b"\n") + 1
        rest = data[cut:]
        if cut:
            yield data[:cut]
        if len(rest) > LINE_BYTES:
            yield rest[:LINE_BYTES] + b"\n"
            rest, skipping = b"", True
    if rest:
        yield rest + b"\n"
