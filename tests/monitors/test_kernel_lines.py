"""Kernel lines other than XIDs, live: those that convict or explain become signals, and nothing else does."""

from __future__ import annotations

import pytest

from outlast.monitors.kmsg import REPEAT_S, SXID_FATAL, TELLING, KernelDecoder
from outlast.reliability.catalogue import load_catalogue
from outlast.reliability.model import KernelSeen, Node

LINES = {
    "nvrm_rm_init": "NVRM: GPU 0000:5e:00.0: RmInitAdapter failed! (0x26:0xffff:1290)",
    "aer_fatal": "pcieport 0000:00:03.0: AER: Uncorrected (Fatal) error received: 0000:00:03.0",
    "pcie_link_down": "pcieport 0000:00:03.0: pciehp: Slot(1): Link Down",
    "pcie_recovery_failed": "pcieport 0000:00:03.0: AER: device recovery failed",
    "edac_ue": "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x3a1f)",
    "memory_failure": "Memory failure: 0x3a1f: recovery action for dirty LRU page: Recovered",
    "mce": "mce: [Hardware Error]: CPU 17: Machine Check Exception: 5 Bank 7: be00000000800400",
    "ghes_fatal": "{1}[Hardware Error]: event severity: fatal",
    "hard_lockup": "NMI watchdog: Watchdog detected hard LOCKUP on cpu 3",
    "soft_lockup": "watchdog: BUG: soft lockup - CPU#44 stuck for 26s! [python3:51122]",
    "kernel_panic": "Kernel panic - not syncing: Fatal exception",
    "kernel_oops": "BUG: unable to handle page fault for address: ffff9b1c00000000",
    "nic_health": "mlx5_core 0000:9a:00.0: poll_health:800:(pid 0): device's health compromised - reached miss count",
    "oom_job": "Memory cgroup out of memory: Killed process 71 (python3) total-vm:9kB, anon-rss:9kB",
    "oom_node": "Out of memory: Killed process 71 (postgres) total-vm:9kB, anon-rss:9kB",
    "disk_array": "md/raid0md0: Disk failure on nvme0n1p1 detected, failing array.",
    "fs_readonly": "EXT4-fs (nvme0n1p1): Remounting filesystem read-only",
    "lustre_evicted": "LustreError: 167-0: s-MDT0-mdc-ff: This client was evicted by s-MDT0; operations fail.",
    "nfs_lost": "nfs: server 10.0.9.2 not responding, timed out",
    "gpfs_lost": "GPFS: mmfsd: this node was expelled from the cluster",
    SXID_FATAL: "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
}


def found(text: str, at_s: float = 1.0, decoder: KernelDecoder | None = None, priority: int = 3) -> list[object]:
    decoder = decoder or KernelDecoder(Node("n1"), "kmsg")
    return list(decoder.record(f"{priority},7,99,-;{text}\n".encode(), at_s))


def test_each_telling_form_has_a_line_here_and_a_row_in_the_catalogue() -> None:
    assert {*TELLING, SXID_FATAL} == LINES.keys()
    for key in LINES:
        assert load_catalogue().kernel(key) is not None, key


@pytest.mark.parametrize("key", LINES)
def test_a_telling_line_is_a_signal(key: str) -> None:
    (signal,) = found(LINES[key])
    assert isinstance(signal, KernelSeen)
    assert (signal.node, signal.key, signal.text) == ("n1", key, LINES[key])


QUIET = (
    "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 13: 9c00004000800090",
    "[Hardware Error]: event severity: fatal",
    "BERT: Error records from previous boot:",
    "mlx5_core 0000:9a:00.0: print_health_info:4: Health issue observed, firmware internal error, severity(3)",
    "mlx5_core 0000:9a:00.0: mlx5_cmd_out_err:838:(pid 9): QUERY_X(0x770) failed, status internal error(0x1), err(-5)",
    "md/raid1:md127: Disk failure on nvme1n1p2, disabling device.",
    "EDAC MC1: 0 UE memory read error",
    "pcieport 0000:20:01.1: AER: device recovery successful",
)


@pytest.mark.parametrize("text", QUIET)
def test_what_the_node_lived_through_takes_it_out_for_nobody(text: str) -> None:
    rows = [load_catalogue().kernel(signal.key) for signal in found(text) if isinstance(signal, KernelSeen)]
    assert not any(row is not None and row.alone for row in rows)


@pytest.mark.parametrize(
    "key", ["pcie_link_down", "pcie_recovery_failed", "lustre_evicted", "soft_lockup", "disk_array"]
)
def test_a_second_witness_is_needed_for_what_has_harmless_causes_too(key: str) -> None:
    row = load_catalogue().kernel(key)
    assert row is not None and not row.alone


def test_a_dead_network_device_is_told_in_either_wording() -> None:
    (signal,) = found("mlx5_core 0000:9a:00.0: poll_health:966:(pid 0): Fatal error 1 detected")
    assert isinstance(signal, KernelSeen) and (signal.key, signal.device) == ("nic_health", "0000:9a:00")


def test_the_device_is_named_where_the_line_does() -> None:
    (signal,) = found(LINES["nic_health"])
    assert isinstance(signal, KernelSeen) and signal.device == "0000:9a:00"


@pytest.mark.parametrize("key", LINES)
def test_what_a_program_writes_into_the_log_is_no_line_of_the_kernel(key: str) -> None:
    assert found(LINES[key], priority=11) == []  # facility 1: any process may write it


@pytest.mark.parametrize(
    "text",
    [
        "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Data {0x50610002, 0x10100030}",
        "nvidia-nvswitch2: SXid (PCI:0000:85:00.0): 22013, Non-fatal, Link 61 x",
        "pcieport 0000:00:03.0: AER: Corrected error received: 0000:00:03.0",
        "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0",
        "NVRM: loading NVIDIA UNIX Open Kernel Module",
        "audit: type=1400 msg='python3: Kernel panic - not syncing: says a user'",
    ],
)
def test_what_is_merely_counted_or_said_is_no_signal(text: str) -> None:
    assert found(text) == []


def test_a_storm_of_one_form_is_one_signal() -> None:
    decoder = KernelDecoder(Node("n1"), "kmsg")
    told = [s for i in range(100) for s in found(LINES["aer_fatal"], at_s=i * REPEAT_S / 200, decoder=decoder)]
    # the records all bear the same number here, so nothing is counted as lost
    assert len(told) == 1
    assert len(found(LINES["aer_fatal"], at_s=2 * REPEAT_S, decoder=decoder)) == 1
    other = LINES["aer_fatal"].replace("00:03.0", "00:04.0")
    assert len(found(other, at_s=2 * REPEAT_S, decoder=decoder)) == 1
