"""Kernel lines that are no XID: PCIe, memory, CPU, OOM, network, file systems, disks. One table. Pure.

A row is the key under which reliability/catalog/kernel.yaml says what the line means, the kind of source, literals of
which one must stand in the line (a cheap first test), and the pattern. The first row that matches counts, so the
more telling form stands first. Patterns are forms of the kernel and its drivers, never of a site.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple


class EventPattern(NamedTuple):
    """One form of line."""

    key: str
    kind: str
    needles: tuple[str, ...]
    regex: re.Pattern[str] | None
    """None: a needle alone is enough."""


def _row(key: str, kind: str, needles: str, pattern: str = "") -> EventPattern:
    return EventPattern(key, kind, tuple(needles.split("|")), re.compile(pattern) if pattern else None)


_CORRECTABLE: Final = r"(?:RxErr|BadTLP|BadDLLP|Rollover|Timeout|NonFatalErr|AdvNonFatalErr|CorrIntErr|HeaderOF)"
_UNCORRECTABLE: Final = (
    r"(?:DLP|SDES|TLP|FCP|CmpltTO|CmpltAbrt|UnxCmplt|RxOF|MalfTLP|ECRC|UnsupReq|ACSViol|UncorrIntErr|BlockedTLP"
    r"|AtomicOpBlocked|TLPBlockedErr|PoisonTLPBlocked)"
)

_PORT: Final = r"(?:^|[\s:(,])(?:mlx[45]|ib|eth|en[opsx]|bnxt|ice|i40e|irdma|hfi1|bond|ixgbe)\S{0,40}.{0,80}"
"""A network device: its name stands alone, so that a virtual one of a container (veth0) is none."""

KERNEL_EVENTS: Final[tuple[EventPattern, ...]] = (
    # the NVIDIA driver, beyond XID
    _row("nvrm_rm_init", "kernel", "RmInitAdapter failed|rm_init_adapter failed|failed to initialize the GPU"),
    _row(
        "smi_driver",
        "nvidia_smi",
        "API mismatch: the client has|Driver/library version mismatch|couldn't communicate with the NVIDIA driver",
    ),
    _row(
        "nvlink_driver_fatal",
        "kernel",
        "knvlink|nvidia-nvlink|NVLink",
        r"(?:knvlink|nvidia-nvlink|NVRM:.{0,60}NVLink).{0,200}(?:[Ff]atal|link (?:is )?down|failed)",
    ),
    _row("nvrm_watchdog", "kernel", "RC watchdog: GPU is probably locked"),
    _row("nvrm_uuid", "not_xid", "NVRM: GPU at ", r"NVRM: GPU at (?:PCI:)?[0-9a-fA-F:.]{7,20}: GPU-"),
    _row(
        "nvrm_banner", "not_xid", "NVRM: loading |nvidia-modeset: Loading|Loaded the UVM driver|nvidia: module license"
    ),
    # PCIe
    _row(
        "pcie_recovery_failed",
        "aer",
        "AER",
        r"AER: .{0,40}(?:device recovery failed|can't recover|subordinate device reset failed)",
    ),
    _row(
        "aer_fatal",
        "aer",
        "Uncorrect",
        r"AER: (?:Multiple )?Uncorrect(?:ed|able) \(Fatal\) error|severity=Uncorrect(?:ed|able) \(Fatal\)",
    ),
    _row(
        "aer_nonfatal",
        "aer",
        "Uncorrect",
        r"AER: (?:Multiple )?Uncorrect(?:ed|able) \(Non-Fatal\) error|severity=Uncorrect(?:ed|able) \(Non-Fatal\)",
    ),
    _row("aer_corrected", "aer", "Correct", r"AER: (?:Multiple )?Correct(?:ed|able) error|severity=Correct(?:ed|able)"),
    _row("pcie_dpc", "aer", "DPC: ", r"DPC: .{0,40}(?:containment event|unmasked uncorrectable error)"),
    _row("pcie_recovered", "aer", "AER", r"AER: .{0,40}device recovery successful"),
    _row(
        "aer_corrected_detail",
        "aer",
        "]",
        rf"^\S{{1,40}} [0-9a-f:.]{{5,16}}: {{1,8}}(?:AER: {{1,4}})?\[ ?[0-9]{{1,2}}\] {_CORRECTABLE}\b",
    ),
    _row(
        "aer_fatal_detail",
        "aer",
        "]",
        rf"^\S{{1,40}} [0-9a-f:.]{{5,16}}: {{1,8}}(?:AER: {{1,4}})?\[ ?[0-9]{{1,2}}\] {_UNCORRECTABLE}\b",
    ),
    _row("aer_corrected_detail", "aer", "error status/mask=", r"error status/mask=0000[0-9a-f]{4}/"),
    _row("aer_fatal_detail", "aer", "error status/mask=|TLP Header:"),
    _row(
        "pcie_link_down",
        "aer",
        "Slot(",
        r"Slot\([^)]{1,16}\): (?:Link Down|Card not present)",
    ),
    _row("pcie_width", "pcie_width", "available PCIe bandwidth, limited by"),
    _row("pcie_width", "pcie_width", "downgraded", r"LnkSta:.{0,60}downgraded"),
    # memory and CPU of the host
    _row("edac_ue", "edac", "EDAC", r"EDAC .{0,60}(?<!\b0 )\bUE\b(?! count 0\b)|EDAC .{0,80}[Uu]ncorrect"),
    _row("edac_ce", "edac", "EDAC", r"EDAC .{0,60}\bCE\b|EDAC .{0,80}[Cc]orrect"),
    _row("memory_failure", "mce", "hardware memory corruption|Uncorrected hardware memory error|Memory failure: 0x"),
    _row("memory_offline", "mce", "Soft offlin|soft offlin|corrected error threshold"),
    # only what is numbered happens now: the firmware's record of the boot before is printed without a number
    _row("ghes_fatal", "mce", "event severity: fatal", r"\{[0-9]{1,9}\}\[Hardware Error\]: event severity: fatal"),
    _row("boot_record", "mce", "event severity: fatal|BERT: Error records from previous boot"),
    _row("ghes_recoverable", "mce", "event severity: recoverable|event severity: corrected|event severity: info"),
    _row("thermal_end", "kernel", "temperature/speed normal|temperature is back to normal"),
    _row("cpu_throttled", "kernel", "temperature above threshold"),
    # the bank's status: its first digit has bit 2 (UC) set where the error could not be corrected
    _row(
        "mce_corrected",
        "mce",
        "Machine Check",
        r"Machine Check(?: Exception)?: [0-9a-f]{1,4} Bank [0-9]{1,3}: [89cd][0-9a-f]{15}\b",
    ),
    _row("mce", "mce", "Machine Check", r"Machine Check(?: Exception|: )|Machine Check Exception"),
    _row("mce_corrected", "mce", "Machine check events logged"),
    _row("mce_detail", "mce", "HANDLING MCE MEMORY ERROR", r"EDAC.{0,40}HANDLING MCE"),
    _row("mce_detail", "mce", "[Hardware Error]", r"^mce: \[Hardware Error\]:"),
    _row("ghes_detail", "mce", "[Hardware Error]"),
    _row("hard_lockup", "kernel", "Watchdog detected hard LOCKUP"),
    _row("soft_lockup", "kernel", "BUG: soft lockup"),
    _row(
        "rcu_stall",
        "kernel",
        "rcu",
        r"\brcu.{0,40}(?:detected stall|self-detected stall|detected expedited stall|starved)",
    ),
    _row("hung_task", "kernel", "blocked for more than", r"task .{1,80} blocked for more than [0-9]{1,9} seconds"),
    _row("kernel_panic", "kernel", "Kernel panic - not syncing"),
    _row(
        "kernel_oops",
        "kernel",
        "BUG: unable to handle|BUG: kernel NULL pointer|kernel BUG at|Oops: |general protection fault, ",
    ),
    # memory limits
    _row("oom_job", "oom", "Memory cgroup out of memory"),
    _row("oom_node", "oom", "Out of memory: Kill"),
    _row("oom_job_detail", "oom", "oom-kill:constraint=CONSTRAINT_MEMCG|oom_memcg="),
    _row("oom_detail", "oom", "invoked oom-killer|oom-kill:constraint=|oom_reaper: reaped"),
    # network
    _row(
        "nic_noise",
        "nic",
        "ACCESS_REG",
        r"mlx5_cmd_out_err.{0,60}ACCESS_REG.{0,60}failed, status bad (?:resource|parameter|operation)",
    ),
    _row(
        "nic_health",
        "nic",
        "health compromised|Fatal error|fatal error|unrecoverable|internal error|health recovery",
        r"mlx[45]_core(?!.{0,160}(?:Health issue observed.{0,120}severity\([3-9]\)|status internal error))"
        r".{0,120}(?:health compromised|[Ff]atal error|unrecoverable|internal error|health recovery .{0,20}fail)",
    ),
    _row(
        "nic_timeout",
        "nic",
        "mlx5|bnxt_en|irdma|hfi1|NETDEV WATCHDOG",
        r"(?:mlx5|bnxt_en|irdma|hfi1).{0,160}(?:timeout|timed out|handling bad device|status internal error)"
        r"|NETDEV WATCHDOG.{0,120}timed out",
    ),
    _row("nic_power", "nic", "insufficient power", r"mlx[45]"),
    _row(
        "nic_module_up",
        "nic",
        "ort module event",
        r"mlx[45].{0,160}[Pp]ort module event: module [0-9]{1,3}, Cable plugged",
    ),
    _row(
        "nic_down",
        "nic",
        "ort module event",
        r"mlx[45].{0,160}[Pp]ort module event: module [0-9]{1,3}, Cable unplugged",
    ),
    _row(
        "nic_module",
        "nic",
        "ort module event|Health issue observed|High Temperature|High temperature|high temperature",
        r"mlx[45].{0,160}(?:[Pp]ort module event\[error\]|Health issue|[Hh]igh [Tt]emperature)",
    ),
    _row(
        "nic_down",
        "nic",
        "ink down|ink is down|ink is Down|ink is not ready",
        rf"{_PORT}[Ll]ink (?:is )?(?:down|Down|not ready)",
    ),
    _row(
        "nic_up",
        "nic",
        "ink up|ink is up|ink is Up",
        rf"{_PORT}[Ll]ink (?:is )?(?:up|Up)",
    ),
    # shared file systems
    _row("lustre_evicted", "lustre", "Lustre", r"Lustre.{0,300}(?:was evicted|evicting|[Ee]victed from (?!MGS))"),
    _row(
        "lustre_back", "lustre", "Lustre", r"Lustre.{0,300}(?:Connection restored|recovery is complete|Recovery over)"
    ),
    _row(
        "lustre_stall",
        "lustre",
        "Lustre|LNetError",
        r"(?:LustreError|LNetError): |Lustre: .{0,400}"
        r"(?:failed|timed out|lost|slow|not available|error|down|retry|refused|Evicted)",
    ),
    _row(
        "nfs_lost",
        "nfs",
        "not responding, timed out|Stale file handle|stale file handle|tale NFS file handle",
        r"(?i:nfs).{0,200}(?:not responding, timed out|[Ss]tale (?:NFS )?file handle)",
    ),
    _row("nfs_stall", "nfs", "not responding", r"nfs4?: server \S{1,255} not responding"),
    _row("nfs_back", "nfs", "nfs", r"nfs4?: server \S{1,255} OK"),
    _row(
        "gpfs_lost",
        "gpfs",
        "mmfs|GPFS",
        r"(?:mmfs|GPFS).{0,200}(?:expel|unmounted|Unmount|lost membership|panic|shutting down abnormally)",
    ),
    _row(
        "gpfs_stall", "gpfs", "mmfs|GPFS", r"(?:mmfs|GPFS).{0,200}(?:wait|lease|[Dd]isk .{0,40}(?:fail|down)|Reconnect)"
    ),
    # local disks
    _row("disk_degraded", "kernel", "md/raid", r"md/raid(?:1|4|5|6|10):.{0,120}Disk failure .{0,60}disabling device"),
    _row(
        "disk_array",
        "kernel",
        "md/raid|Disk failure on",
        r"md/raid.{0,120}Disk failure",
    ),
    _row("disk_timeout", "kernel", "nvme", r"nvme.{0,40}I/O (?:tag )?[0-9]{1,6}.{0,60}timeout"),
    _row(
        "fs_readonly",
        "kernel",
        "EXT4-fs|XFS|BTRFS",
        r"(?:EXT4-fs|XFS|BTRFS).{0,120}"
        r"(?:emounting filesystem read-only|[Cc]orruption|shut down due to .{0,60}error|I/O error|error \(device)",
    ),
    _row(
        "disk_error",
        "kernel",
        "I/O error|failing I/O|Medium Error|controller is down|I/O Error",
        r"(?:nvme|blk_update_request|critical \w{1,10} error|sd[a-z]|ata[0-9]|XFS|EXT4).{0,160}"
        r"(?:I/O [Ee]rror|failing I/O|Medium Error|controller is down)|I/O error, dev|Buffer I/O error",
    ),
    # programs that crashed
    _row("segfault_nccl", "kernel", "libnccl", r"(?:segfault at|general protection|traps:).{0,200} in libnccl"),
    _row(
        "segfault",
        "kernel",
        "segfault at|traps: |trap invalid opcode|general protection",
        r"\S{1,64}\[[0-9]{1,10}\].{0,8}(?:segfault at|general protection|trap \w{2,20})|traps: .{0,120}trap",
    ),
    _row("xid_mmu_detail", "xid", "MMU Fault: ENGINE|Fault is of type FAULT_"),
    _row("nvrm_other", "not_xid", "NVRM: |nvidia-uvm: |nvidia-modeset: |nvidia-peermem|nvidia-persistenced"),
)

_PCI_DEVICE: Final = re.compile(r"\b([0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?\b")


def read_kernel_event(text: str) -> EventPattern | None:
    """The form of this kernel message, or None."""
    for row in KERNEL_EVENTS:
        for needle in row.needles:
            if needle in text:
                if row.regex is None or row.regex.search(text):
                    return row
                break
    return None


def pci_device(text: str) -> str | None:
    """The first full PCI address in a message, dddd:bb:dd."""
    m = _PCI_DEVICE.search(text)
    return m[1].lower() if m else None
