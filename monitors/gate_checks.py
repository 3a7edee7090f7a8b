"""What the node gate looks at, one function a check. Standard library only; each returns findings and never raises.

`fault` is proven by what was read here and now; a check that timed out, was refused or could not be understood is
`unknown`. The GPU part runs in a child (gate_child.py) through nvidia-ml-py where that is installed.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

WELL, FAULT, UNKNOWN = "well", "fault", "unknown"

_NOT_OURS = (errno.EACCES, errno.EPERM)
OLDEST_CLOCK_S = 1_700_000_000.0
"""November 2023, before this program existed: a clock that shows less was never set."""
NEWEST_CLOCK_S = 4_000_000_000.0
_HW_THROTTLE = {0x8: "hardware slowdown", 0x40: "hardware thermal slowdown", 0x80: "hardware power brake"}


class Finding(NamedTuple):
    """One thing that was looked at."""

    check: str
    outcome: str
    found: str
    expected: str = ""

    def __str__(self) -> str:
        expected = f", expected {self.expected}" if self.expected else ""
        return f"{self.check}: {self.outcome}: {self.found}{expected}"


def write_probe(path: str) -> str:
    """In a child: make, write, sync and remove a small file. 'ok SKEW_S' or 'ERRNO text'."""
    name = os.path.join(path, f".outlast-gate-{os.uname().nodename}-{os.getpid()}")
    try:
        before_s = time.time()
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"outlast node gate\n" * 64)
            os.fsync(fd)
            # the file server stamps it: its clock against ours
            skew_s = os.fstat(fd).st_mtime - before_s
        finally:
            os.close(fd)
            os.unlink(name)
    except OSError as e:
        return f"{e.errno or 0} {e.strerror}"
    return f"ok {skew_s:.3f}"


def judge_write(path: str, answer: str, why: str, clock_skew_s: float) -> list[Finding]:
    """Findings for one directory from what its child said."""
    check = f"writable {path}"
    if why:
        return [Finding(check, UNKNOWN, why)]
    word, _, rest = answer.partition(" ")
    if word != "ok":
        code = int(word) if word.isdigit() else 0
        return [Finding(check, UNKNOWN if code in _NOT_OURS else FAULT, rest or answer, "a writable directory")]
    found = [Finding(check, WELL, "writable")]
    skew_s = float(rest or 0.0)
    if clock_skew_s > 0 and abs(skew_s) > clock_skew_s:
        # either clock may be the wrong one
        text = f"this node's clock is {-skew_s:+.0f} s from that of the file server of {path}"
        found.append(Finding("clock", UNKNOWN, text, f"within {clock_skew_s:g} s"))
    return found


def mount_probe(path: str) -> str:
    """In a child: whether something is mounted exactly here."""
    return "ok" if os.path.ismount(path) else "no"


def judge_mount(path: str, answer: str, why: str) -> list[Finding]:
    if why:
        return [Finding(f"mounted {path}", UNKNOWN, why)]
    if answer == "ok":
        return [Finding(f"mounted {path}", WELL, "mounted")]
    return [Finding(f"mounted {path}", FAULT, "nothing is mounted there", "a mount")]


def check_shm(min_bytes: int, path: str = "/dev/shm") -> list[Finding]:
    """Space that data loaders and NCCL need."""
    try:
        status = os.statvfs(path)
    except OSError as e:
        return [Finding("shm", UNKNOWN, f"{path}: {e.strerror}")]
    free = status.f_bavail * status.f_frsize
    if free < min_bytes:
        return [Finding("shm", FAULT, f"{free:,} bytes free in {path}", f"at least {min_bytes:,}")]
    return [Finding("shm", WELL, f"{free:,} bytes free")]


def check_clock() -> list[Finding]:
    """A clock that was never set makes log times, tokens and file times worthless."""
    now_s = time.time()
    if not OLDEST_CLOCK_S < now_s < NEWEST_CLOCK_S:
        return [Finding("clock", FAULT, f"the clock shows {time.strftime('%Y-%m-%d', time.gmtime(now_s))}", "today")]
    return [Finding("clock", WELL, "plausible")]


def check_leftovers(markers: Iterable[str], allow: Iterable[int], proc: str = "/proc") -> list[Finding]:
    """Processes whose environment or command line holds a marker of ours, our own ancestors and `allow` apart."""
    wanted = [m.encode() for m in markers if m]
    if not wanted:
        return []
    ours = {*allow, *_ancestors(proc)}
    left: list[str] = []
    for entry in os.listdir(proc):
        if not entry.isdigit() or int(entry) in ours:
            continue
        # a zombie has neither: it is gone but for its parent's wait
        if any(m in _read(f"{proc}/{entry}/environ") or m in _read(f"{proc}/{entry}/cmdline") for m in wanted):
            left.append(entry)
    if left:
        return [Finding("leftovers", FAULT, f"processes {', '.join(left[:20])} of an earlier run", "none")]
    return [Finding("leftovers", WELL, "none")]


def _ancestors(proc: str) -> set[int]:
    seen: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in seen and len(seen) < 64:
        seen.add(pid)
        fields = _read(f"{proc}/{pid}/stat").rpartition(b")")[2].split()
        pid = int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else 0
    return seen


def _read(path: str) -> bytes:
    """A file of /proc or /sys, bounded; b'' where it cannot be read (the process has just ended, is another's)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, 1 << 18)
    except OSError:
        return b""
    finally:
        os.close(fd)


def free_port(address: str) -> tuple[int, list[Finding]]:
    """A port that nobody holds on this address just now."""
    import socket

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as s:
            s.bind((address, 0))
            return int(s.getsockname()[1]), []
    except OSError as e:
        return 0, [Finding("port", UNKNOWN, f"no port on {address}: {e.strerror}")]


def check_ib(ports: Iterable[str], sysfs: str = "/sys/class/infiniband") -> list[Finding]:
    """`mlx5_0:1` must be ACTIVE and LinkUp; `all` means each port that the node has."""
    wanted = list(ports)
    if "all" in wanted:
        wanted = [f"{d}:{p}" for d in _listed(sysfs) for p in _listed(f"{sysfs}/{d}/ports")]
        if not wanted:
            return [Finding("ib", FAULT, "this node shows no InfiniBand port", "at least one")]
    found: list[Finding] = []
    for port in wanted:
        device, _, number = port.partition(":")
        where = f"{sysfs}/{device}/ports/{number or '1'}"
        state = _read(f"{where}/state").decode("ascii", "replace").strip()
        physical = _read(f"{where}/phys_state").decode("ascii", "replace").strip()
        if not state:
            found.append(Finding(f"ib {port}", FAULT, "no such port", "ACTIVE"))
        elif "ACTIVE" not in state or "LinkUp" not in physical:
            found.append(
                Finding(f"ib {port}", FAULT, f"{state}, {physical or 'physical state unknown'}", "ACTIVE, LinkUp")
            )
        else:
            found.append(Finding(f"ib {port}", WELL, state))
    return found


def _listed(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def judge_gpus(
    gpus: list[dict[str, Any]], expected: int, used_max_bytes: int, skip: Iterable[str] = ()
) -> list[Finding]:
    """Findings from what gate_nvml read of each GPU; a value that a GPU does not have is None and is not judged."""
    found: list[Finding] = []
    if expected >= 0:
        outcome = WELL if len(gpus) == expected else FAULT
        found.append(Finding("gpu count", outcome, f"{len(gpus)} GPUs", str(expected)))
    left_out = set(skip)
    for gpu in gpus:
        name = f"gpu {gpu.get('pci', '?')}"
        for check, bad, text, wanted in _gpu_faults(gpu, used_max_bytes):
            if bad and check not in left_out:
                found.append(Finding(f"{name} {check}", FAULT, text, wanted))
    return found


def _gpu_faults(gpu: dict[str, Any], used_max_bytes: int) -> list[tuple[str, bool, str, str]]:
    def number(key: str) -> int:
        value = gpu.get(key)
        return value if isinstance(value, int) else 0

    width, width_max = number("pcie_width"), number("pcie_width_max")
    throttle = [text for bit, text in _HW_THROTTLE.items() if number("throttle") & bit]
    return [
        ("lost", gpu.get("lost") is True, "the GPU does not answer", "an answer"),
        (
            "ecc",
            number("ecc_uncorrected") > 0,
            f"{number('ecc_uncorrected')} uncorrectable errors since its reset",
            "0",
        ),
        ("remap", number("remap_failed") > 0, "a row remap failed", "none"),
        ("retired", number("retired_pending") > 0, "page retirement waits for a reset", "none"),
        ("recovery", number("recovery") > 0, f"the driver asks for recovery action {number('recovery')}", "none"),
        ("pcie", 0 < width < width_max, f"PCIe x{width}", f"x{width_max}"),
        ("throttle", bool(throttle), ", ".join(throttle), "none"),
        (
            "memory",
            number("used_bytes") > used_max_bytes,
            f"{number('used_bytes'):,} bytes in use",
            f"at most {used_max_bytes:,}",
        ),
        ("nvlink", number("nvlinks_down") > 0, f"{number('nvlinks_down')} of its NVLinks are down", "all up"),
    ]
