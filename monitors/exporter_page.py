"""A dcgm-exporter page (Prometheus text) to samples, quickly: the same series come again, so each is read once.

    METRIC{gpu="0",UUID="GPU-..",pci_bus_id="..",Hostname="n1",...} 966
    \\______________ the key: parsed once, then looked up ________/  \\_ float

Pure. One reader for one exporter: it remembers the keys of that page alone, and forgets them when labels change faster
than pages (a job's id is a label). It says nothing of what a value means; that is dcgm.py. Any bytes are read: what is
no sample is counted in `unread`, never raised.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, NamedTuple

PAGE_BYTES: Final = 16 << 20
"""More of a page is not looked at: a node's page has about 100 kB."""
LINE_BYTES: Final = 1 << 14
SPARE_KEYS: Final = 256

_LABEL: Final = re.compile(rb'([A-Za-z_][A-Za-z0-9_]{0,127})="((?:[^"\\]|\\.)*)"[,\s]*')
_NAME: Final = re.compile(rb"[A-Za-z_:][A-Za-z0-9_:]{0,255}")
_ESCAPE: Final = re.compile(r"\\(.)")
_BLANK_LONG: Final = 2.0**63 - 2048
"""DCGM's blank, not found, not supported and not permitted: 0x7ffffffffffffff0 and the three after it."""
_BLANK_INT: Final = frozenset((2147483632.0, 2147483633.0, 2147483634.0, 2147483635.0))
_BLANK_REAL: Final = frozenset((140737488355328.0, 140737488355329.0, 140737488355330.0, 140737488355331.0))


class Device(NamedTuple):
    """Whose sample it is, by its labels; '' where the page does not say."""

    node: str = ""
    number: str = ""
    """The GPU as the node counts it."""
    uuid: str = ""
    pci: str = ""
    instance: str = ""
    """The MIG instance's id."""


class Series(NamedTuple):
    metric: str
    device: Device
    xid: str = ""
    """The label `xid` of the counter of XIDs."""


@dataclass(slots=True)
class Page:
    """What one page says."""

    samples: list[tuple[Series, float]] = field(default_factory=list)
    """In the page's order, without blank values."""
    blanks: list[Series] = field(default_factory=list)
    """Series that are there and have no value."""
    unread: int = 0
    """Lines that are neither sample nor comment."""
    cut: bool = False
    """The page was longer than PAGE_BYTES."""


class PageReader:
    """Reads the pages of one exporter. `wanted`: these metrics only; None: all."""

    def __init__(self, *, wanted: Collection[str] | None = None, uuid_label: str = "UUID") -> None:
        self._wanted = None if wanted is None else frozenset(wanted)
        self._uuid_label = uuid_label
        self._known: dict[bytes, Series | None] = {}
        self._devices: dict[bytes, tuple[Device, str] | None] = {}

    def read(self, text: bytes) -> Page:
        """One page. Never raises."""
        page = Page(cut=len(text) > PAGE_BYTES)
        known, add = self._known, page.samples.append
        for line in (text[:PAGE_BYTES] if page.cut else text).split(b"\n"):
            # the labels' values may hold anything, but what follows the last of them is the value
            head, _, tail = line.rpartition(b"} ")
            try:
                series = known[head]
            except KeyError:
                series = self._learn(head, line, page)
            if series is None:
                if not head and line and line[0] != 35:  # '#'
                    self._bare(line, page)
                continue
            try:
                value = float(tail)
            except ValueError:
                self._odd_value(series, tail, page)
                continue
            if -2147483632.0 < value < 2147483632.0:
                add((series, value))
            else:
                _add_large(series, value, page)
        if len(known) > 2 * len(page.samples) + SPARE_KEYS:
            known.clear()
            self._devices.clear()
        return page

    def _learn(self, head: bytes, line: bytes, page: Page) -> Series | None:
        """A key that was not seen before; None: none of ours. What cannot be read is not remembered."""
        if not head or head[:1] == b"#":
            if len(head) < LINE_BYTES:
                self._known[head] = None
            return None
        name, brace, labels = head.partition(b"{")
        if not brace or not _NAME.fullmatch(name) or len(head) > LINE_BYTES:
            page.unread += 1
            return None
        metric = name.decode("ascii")
        if self._wanted is not None and metric not in self._wanted:
            self._known[head] = None
            return None
        found = self._devices.get(labels) or self._read_labels(labels)
        if found is None:
            page.unread += 1
            return None
        self._devices[labels] = found
        series = self._known[head] = Series(metric, *found)
        return series

    def _read_labels(self, text: bytes) -> tuple[Device, str] | None:
        labels: dict[str, str] = {}
        at = 0
        while at < len(text):
            m = _LABEL.match(text, at)
            if m is None:
                return None
            value = m[2].decode("utf-8", "replace")
            labels[m[1].decode("ascii")] = _unescaped(value) if "\\" in value else value
            at = m.end()
        get = labels.get
        device = Device(
            node=get("Hostname") or get("hostname") or "",
            number=get("gpu", ""),
            uuid=get(self._uuid_label) or get("UUID") or get("uuid") or "",
            pci=get("pci_bus_id", ""),
            instance=get("GPU_I_ID", ""),
        )
        return device, get("xid", "")

    def _bare(self, line: bytes, page: Page) -> None:
        """A sample without labels belongs to no GPU; anything else cannot be read."""
        name, _, value = line.strip().partition(b" ")
        if _NAME.fullmatch(name) and value:
            return
        page.unread += 0 if not line.strip() else 1

    def _odd_value(self, series: Series, tail: bytes, page: Page) -> None:
        """A value with its time after it; else none that can be read."""
        try:
            value = float(tail.split(None, 1)[0])
        except (ValueError, IndexError):
            page.unread += 1
            return
        _add_large(series, value, page)


def _add_large(series: Series, value: float, page: Page) -> None:
    # not a number is not equal to itself
    if value >= _BLANK_LONG or value != value or value == float("-inf") or value in _BLANK_INT | _BLANK_REAL:
        page.blanks.append(series)
    else:
        page.samples.append((series, value))


def _unescaped(value: str) -> str:
    return _ESCAPE.sub(lambda m: "\n" if m[1] == "n" else m[1], value)
