"""The exporter's page: our reader beside prometheus_client's, and what its gauges and gaps become."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from outlast.monitors.dcgm import FIELDS, WANTED, ExporterMemory, Found, gpu_states
from outlast.monitors.exporter_page import PageReader
from outlast.reliability.model import GpuChanged, SourceBlind, XidSeen

BLANK = "9223372036854775794"
XID = "DCGM_FI_DEV_XID_ERRORS"
NAMES = ("DCGM_FI_DEV_GPU_TEMP", XID, "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "DCGM_FI_DEV_ROW_REMAP_FAILURE")


def line(
    metric: str,
    value: object,
    gpu: int = 0,
    *,
    host: str = "Hostname",
    uuid: str = "UUID",
    more: str = "",
    node: str = "n1",
) -> str:
    return (
        f'{metric}{{gpu="{gpu}",{uuid}="GPU-{gpu:04d}",pci_bus_id="00000000:{0x1A + 16 * gpu:02X}:00.0",'
        f'device="nvidia{gpu}",modelName="NVIDIA H100 80GB HBM3"{more},{host}="{node}"}} {value}'
    )


def page(xid: object = 0, *, gpus: int = 2, host: str = "Hostname", **values: object) -> bytes:
    """A page in the exporter's layout; `values` by metric are for GPU 0."""
    lines: list[str] = []
    for metric in NAMES:
        lines += [f"# HELP {metric} something.", f"# TYPE {metric} gauge"]
        for gpu in range(gpus):
            value = values.get(metric, 40) if gpu == 0 else 40
            if metric == XID:
                value = xid if gpu == 0 else 0
            elif metric != "DCGM_FI_DEV_GPU_TEMP":
                value = values.get(metric, 0) if gpu == 0 else 0
            if value is not None:
                lines.append(line(metric, value, gpu, host=host))
    return "\n".join(lines).encode() + b"\n"


class Watched:
    """A reader and a memory, as they stand beside one exporter."""

    def __init__(self) -> None:
        self.reader, self.memory, self.at_s = PageReader(wanted=WANTED), ExporterMemory(), 0.0

    def see(self, text: bytes) -> list[Found]:
        self.at_s += 15.0
        return self.memory.take(self.reader.read(text), self.at_s)

    def codes(self, text: bytes) -> list[int]:
        return [f.code for f in self.see(text) if isinstance(f, XidSeen)]


def test_it_reads_what_prometheus_client_reads() -> None:
    text = page(31, DCGM_FI_DEV_GPU_TEMP="41.5") + b'up{job="a\\"b\\\\c}, d\\n"} 1 1700000000000\n'
    theirs = [
        (s.name, s.labels.get("gpu", ""), s.labels.get("UUID", ""), s.labels.get("Hostname", ""), float(s.value))
        for family in text_string_to_metric_families(text.decode())
        for s in family.samples
    ]
    reader = PageReader()
    for _ in range(2):  # the second time by its remembered keys
        read = reader.read(text)
        ours = [(s.metric, s.device.number, s.device.uuid, s.device.node, value) for s, value in read.samples]
        assert sorted(ours) == sorted(theirs)
        assert (read.unread, read.blanks) == (0, [])


def test_labels_of_all_spellings_name_the_same_gpu() -> None:
    texts = [
        line(XID, 31),
        line(XID, 31, host="hostname"),
        line(XID, 31, more=',GPU_I_PROFILE="1g.10gb",GPU_I_ID="7",hpc_job="4711",err_code="31",err_msg="a } b"'),
    ]
    for text in texts:
        [(series, value)] = PageReader(wanted=WANTED).read(text.encode()).samples
        assert (series.device.node, series.device.uuid, value) == ("n1", "GPU-0000", 31.0)
    assert series.device.instance == "7"
    other = line(XID, 31, uuid="gpu_uuid").encode()
    assert PageReader(uuid_label="gpu_uuid").read(other).samples[0][0].device.uuid == "GPU-0000"


@pytest.mark.parametrize(
    "value", [BLANK, "9223372036854775792", "9.223372036854776e+18", "2147483632", "140737488355328", "NaN", "+Inf"]
)
def test_a_blank_value_is_no_value(value: str) -> None:
    read = PageReader().read(line("DCGM_FI_DEV_ROW_REMAP_FAILURE", value).encode())
    assert (read.samples, len(read.blanks), read.unread) == ([], 1, 0)
    # a large counter that happens not to be a blank is kept
    [(_, energy)] = PageReader().read(line("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 9_000_000_000_123).encode()).samples
    assert energy == 9_000_000_000_123.0


def test_the_gauge_tells_once() -> None:
    exporter = Watched()
    assert exporter.codes(page(0)) == []
    assert exporter.codes(page(31)) == [31]
    assert [exporter.codes(page(31)) for _ in range(50)] == [[]] * 50
    assert exporter.codes(page(79)) == [79]
    assert exporter.codes(page(31)) == [31]
    assert exporter.codes(page(0)) == []
    assert exporter.codes(page(31)) == [31]


def test_what_the_gauge_held_before_we_looked_is_no_event() -> None:
    exporter = Watched()
    assert exporter.see(page(79)) == []
    assert exporter.codes(page(79)) == []
    assert exporter.codes(page(94)) == [94]


def test_a_series_that_changes_its_labels_with_the_code_is_the_same_gauge() -> None:
    exporter = Watched()
    exporter.see(page(0))
    for _ in range(2):
        text = line(XID, 31, more=',err_code="31",err_msg="GPU memory page fault"').encode()
        assert exporter.codes(page(None) + text) == ([31] if _ == 0 else [])


def test_an_instance_and_its_gpu_are_one_event() -> None:
    exporter = Watched()

    def instances(code: int) -> bytes:
        lines = (line(XID, code, more=f',GPU_I_PROFILE="1g.10gb",GPU_I_ID="{i}"') for i in (7, 8))
        return "\n".join(lines).encode()

    exporter.see(instances(0))
    [seen] = exporter.see(instances(94))
    assert isinstance(seen, XidSeen)
    assert (seen.code, seen.gpu, seen.node, seen.source) == (94, "0000:1a:00", "n1", "dcgm")


def test_the_counter_of_xids_shows_equal_ones_in_a_row() -> None:
    count = "DCGM_EXP_XID_ERRORS_COUNT"
    exporter = Watched()
    exporter.see(page(0))
    assert exporter.codes(page(31) + line(count, 1, more=',xid="31"').encode()) == [31]
    assert exporter.codes(page(31) + line(count, 2, more=',xid="31"').encode()) == [31]
    assert exporter.codes(page(31) + line(count, 2, more=',xid="31"').encode()) == []
    assert exporter.codes(page(31) + line(count, 1, more=',xid="31"').encode()) == []


def test_after_a_restart_an_empty_gauge_does_not_make_the_old_code_new() -> None:
    exporter = Watched()
    exporter.see(page(0))
    assert exporter.codes(page(79, DCGM_FI_DEV_ECC_DBE_VOL_TOTAL=3)) == [79]
    assert exporter.memory.silent("connection refused", 60.0) != []
    assert exporter.memory.silent("connection refused", 75.0) == []
    assert exporter.codes(page(0)) == []
    assert exporter.codes(page(79)) == []
    assert exporter.codes(page(94)) == [94]
    # a counter that goes back tells of a restart between two pages
    other = Watched()
    other.see(page(0, DCGM_FI_DEV_ECC_DBE_VOL_TOTAL=3))
    assert other.codes(page(31, DCGM_FI_DEV_ECC_DBE_VOL_TOTAL=3)) == [31]
    assert other.see(page(0, DCGM_FI_DEV_ECC_DBE_VOL_TOTAL=0)) == []
    assert other.codes(page(31, DCGM_FI_DEV_ECC_DBE_VOL_TOTAL=0)) == []


def test_a_renamed_label_is_neither_a_new_gpu_nor_a_new_event() -> None:
    exporter = Watched()
    exporter.see(page(0))
    assert exporter.codes(page(31)) == [31]
    assert exporter.see(page(31, host="hostname")) == []


def test_series_and_gpus_that_vanish_are_blindness_said_once() -> None:
    exporter = Watched()
    exporter.see(page(0))
    without = b"\n".join(row for row in page(0).split(b"\n") if b"ROW_REMAP" not in row)
    [blind] = exporter.see(without)
    assert isinstance(blind, SourceBlind) and "DCGM_FI_DEV_ROW_REMAP_FAILURE" in blind.why
    assert exporter.see(without) == []
    [blind] = exporter.see(page(0, gpus=1))
    assert isinstance(blind, SourceBlind) and blind.why == "not on the page any more: GPU 0000:2a:00"
    assert exporter.see(page(0, gpus=1)) == []
    [blind] = exporter.see(b"# HELP nothing\n")
    assert isinstance(blind, SourceBlind) and "no sample" in blind.why
    assert exporter.see(b"") == []
    assert exporter.see(page(0)) == []
    assert len(exporter.see(b"")) == 1


def test_a_blank_gauge_changes_nothing() -> None:
    exporter = Watched()
    exporter.see(page(0))
    exporter.codes(page(31))
    assert exporter.codes(page(BLANK)) == []
    assert exporter.codes(page(31)) == []


def test_states_are_told_at_first_sight_and_counters_when_they_grow() -> None:
    exporter = Watched()
    bad = {"DCGM_FI_DEV_ROW_REMAP_FAILURE": 1, "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 4}
    [first] = exporter.see(page(0, **bad))
    assert isinstance(first, GpuChanged)
    assert (first.field, first.before, first.now, first.gpu) == ("remap_failed", None, 1, "0000:1a:00")
    assert exporter.see(page(0, **bad)) == []
    [grown] = exporter.see(page(0, **{**bad, "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 6}))
    assert isinstance(grown, GpuChanged) and (grown.field, grown.before, grown.now) == ("ecc_uncorrected", 4, 6)
    [repaired] = exporter.see(page(0, DCGM_FI_DEV_ECC_DBE_VOL_TOTAL=6))
    assert isinstance(repaired, GpuChanged) and (repaired.field, repaired.now) == ("remap_failed", 0)


def test_every_field_of_the_table_is_read() -> None:
    for metric, (field, _) in FIELDS.items():
        [state] = gpu_states(PageReader(wanted=WANTED).read(line(metric, 200).encode())).values()
        assert getattr(state, field) is not None, metric
    crc = "\n".join(line(f"DCGM_FI_DEV_NVLINK_CRC_{kind}_ERROR_COUNT_TOTAL", 3) for kind in ("FLIT", "DATA"))
    [state] = gpu_states(PageReader().read(crc.encode())).values()
    assert state.nvlink_crc_errors == 6


def test_labels_that_change_with_every_page_do_not_pile_up() -> None:
    reader = PageReader()
    for job in range(2_000):
        reader.read("\n".join(line(XID, 0, gpu, more=f',hpc_job="{job}"') for gpu in range(4)).encode())
    assert len(reader._known) < 600 and len(reader._devices) < 600


@given(st.lists(st.binary(max_size=4_000), min_size=1, max_size=3))
def test_any_bytes_are_a_page(pages: list[bytes]) -> None:
    exporter = Watched()
    for text in pages:
        exporter.see(text)
        exporter.see(page(0) + text)
    # whatever came before, a good page is read
    assert exporter.codes(page(94)) == [94]


@given(st.integers(), st.data())
def test_a_damaged_page_is_read_as_far_as_it_goes(seed: int, data: st.DataObject) -> None:
    """Bytes of a good page overwritten, cut and doubled; what is read is never more than what stood there."""
    chance = random.Random(seed)
    text = bytearray(page(31, DCGM_FI_DEV_ECC_DBE_VOL_TOTAL=2))
    for _ in range(data.draw(st.integers(0, 40))):
        text[chance.randrange(len(text))] = chance.randrange(256)
    cut = bytes(text[: data.draw(st.integers(0, len(text)))])
    exporter = Watched()
    exporter.see(page(0))
    exporter.see(cut)
    assert len(exporter.reader.read(cut).samples) <= cut.count(b"\n") + 1
