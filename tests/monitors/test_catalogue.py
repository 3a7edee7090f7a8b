"""The catalogue's tables and what a line's own words make of a row."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from outlast.monitors.rank_patterns import PATTERNS
from outlast.reliability.catalogue import FILES, TABLES, CatalogueError, load_catalogue

CLASSES = {
    *("gpu_app_fault", "gpu_secondary", "gpu_memory_ue", "gpu_memory_remap", "gpu_memory_remap_fail", "gpu_bus_loss"),
    *("gpu_hang", "gsp_fault", "gpu_thermal", "nvlink_fatal", "nvlink_nonfatal", "nvswitch_fatal", "nvswitch_nonfatal"),
    *("recovery_hint", "unknown_xid", "pcie_correctable", "pcie_fatal", "pcie_degraded", "host_memory_ce"),
    *("host_memory_ue", "host_mce", "host_hw_recoverable", "kernel_hung", "oom_job", "oom_node", "nic_link_flap"),
    *("nic_health", "nic_power", "filesystem_stall", "filesystem_lost", "storage_error", "nccl_timeout_culprit"),
    *("nccl_timeout_victim", "nccl_net_error", "nccl_internal", "peer_died", "app_exception", "sdc_suspect"),
    *("sdc_confirmed", "instability", "loss_anomaly", "straggler", "progress", "node_fail", "benign", "unparsed"),
}
ACTIONS = {
    *("ignore", "watch", "follow_other", "collect", "diagnose", "restart_app", "restart_job", "restart_app_watch"),
    *("rerun_elsewhere", "replay_check", "watch_reset_at_idle", "drain_reset", "drain_reboot", "drain_check_cooling"),
    *("drain_field_diag", "drain_rma", "stop_job", "contact_support"),
}


def test_every_row_uses_the_vocabulary() -> None:
    catalogue = load_catalogue()
    assert set(catalogue.xids) == set(range(1, 177))
    for name in TABLES:
        rows = catalogue.xids if name == "xids" else catalogue._table(name)
        for row in rows.values():
            assert row.action in ACTIONS, row
            assert getattr(row, "class_", "benign") in CLASSES, row
    assert len(catalogue._table("sxids")) == 400


def test_only_hardware_convicts_and_an_application_class_never_drains() -> None:
    for row in load_catalogue().xids.values():
        if row.drains:
            assert row.alone and row.convicts and row.class_ not in ("gpu_app_fault", "gpu_secondary", "unknown_xid"), (
                row
            )
            assert row.blames not in ("program", "data"), row
        assert row.action.startswith("drain") == row.drains or row.code == 154, row


def test_the_rows_that_matter_most() -> None:
    catalogue = load_catalogue()
    lost = catalogue.xid(79)
    assert (lost.drains, lost.stops_training, lost.class_, lost.action) == (True, True, "gpu_bus_loss", "drain_reboot")
    for code in (13, 31, 43, 45, 63, 94, 92, 999):
        assert not catalogue.xid(code).convicts, code
    assert catalogue.xid(999).class_ == "unknown_xid"
    assert catalogue.xid(64).action == "drain_rma"


RECOVERY = "GPU recovery action changed from 0x0 (None) to 0x4 ({})"


@pytest.mark.parametrize(
    ("code", "text", "class_", "action", "drains"),
    [
        (154, RECOVERY.format("Node Reboot Required"), "recovery_hint", "drain_reboot", True),
        (154, RECOVERY.format("GPU Reset Required"), "recovery_hint", "drain_reset", True),
        (154, RECOVERY.format("Drain and Reset"), "recovery_hint", "drain_reset", True),
        (154, RECOVERY.format("None"), "recovery_hint", "ignore", False),
        (154, RECOVERY.format("Sacrifice"), "recovery_hint", "contact_support", False),
        (154, "(", "unparsed", "contact_support", False),
        (149, "NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x0)", "nvlink_fatal", "drain_reset", True),
        (149, "NETIR_LINK_EVT Nonfatal XC0 i0 Link 09 (0x0)", "nvlink_nonfatal", "watch", False),
        (149, "NETIR_LINK_EVT Fatal XC0 i1 Link 09 (0x0)", "nvlink_fatal", "ignore", False),
        (149, "NETIR_LINK", "nvlink_nonfatal", "watch", False),
        (74, "NVLink: fatal error detected on link 5(0x800000, 0x0, 0x0)", "nvlink_nonfatal", "ignore", False),
        (74, "NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000)", "nvlink_fatal", "drain_reset", True),
        (79, "GPU has fallen off the bus. Fatal", "gpu_bus_loss", "drain_reboot", True),
    ],
)
def test_the_lines_words_outrank_the_table(code: int, text: str, class_: str, action: str, drains: bool) -> None:
    row = load_catalogue().xid(code, text)
    assert (row.class_, row.action, row.drains, row.convicts) == (class_, action, drains, drains)


def test_every_pattern_of_a_rank_has_its_row() -> None:
    catalogue = load_catalogue()
    for pattern in PATTERNS:
        row = catalogue.rank_log(pattern.key)
        assert row is not None, pattern.key
        assert row.echo == pattern.echo


def test_conflicts_state_the_choice_that_the_table_holds() -> None:
    conflicts = yaml.safe_load((FILES / "xid_conflicts.yaml").read_text())["conflicts"]
    catalogue = load_catalogue()
    assert len(conflicts) > 100
    for code, row in conflicts.items():
        assert row["choice"] == catalogue.xid(code).action and row["why"] and row["out"] and row["stay"]


def test_a_site_changes_single_keys_and_sees_what_changed(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text(
        "xids:\n  79: {action: watch, drains: false, alone: false, convicts: false}\n"
        "  500: {name: x, class: benign, action: ignore, blames: unknown}\n"
        "kernel:\n  hung_task: {action: drain_reboot}\n"
    )
    catalogue = load_catalogue(site)
    assert (catalogue.xid(79).action, catalogue.xid(79).drains, catalogue.xid(79).class_) == (
        "watch",
        False,
        "gpu_bus_loss",
    )
    assert catalogue.xid(500).class_ == "benign"
    hung = catalogue.kernel("hung_task")
    assert hung is not None and hung.action == "drain_reboot"
    assert "79.action: drain_reboot -> watch" in catalogue.changed


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("xids:\n  79: {actoin: watch}\n", "xids.79"),
        ("xids:\n  79: {blames: someone}\n", "xids.79.blames"),
        ("xids:\n  79: watch\n", "xids.79"),
        ("xid:\n  79: {}\n", "expected only"),
        ("xids: [1]\n", "expected rows by key"),
        ("{", "not YAML"),
    ],
)
def test_a_bad_site_file_is_named_with_its_key(tmp_path: Path, text: str, where: str) -> None:
    site = tmp_path / f"{abs(hash(text))}.yaml"
    site.write_text(text)
    with pytest.raises(CatalogueError, match="yaml") as caught:
        load_catalogue(site)
    assert where in str(caught.value)


def test_loading_is_quick_enough_for_a_command() -> None:
    def load() -> float:
        load_catalogue.__globals__["_load"].cache_clear()
        began = time.process_time()
        catalogue = load_catalogue()
        catalogue.sxid(12028), catalogue.kernel("mce"), catalogue.rank_log("crash")
        return time.process_time() - began

    assert min(load() for _ in range(5)) < 0.2  # about 0.04 s; the best of five, since others use the machine too
