"""Any line of any log to a Reading: finds the reader that knows it. Pure; bounded memory of the lines before.

    raw line -> prefix off -> kernel | tool | job reader -> Reading          (sieve.py takes most lines out before)

Not a judge: what a Reading means is the catalogue's. Of what went before it keeps only what a line needs to be read:
the GPU that a three-line loss named first, the test to which a continued table cell belongs, recent step times.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from outlast.monitors.job_lines import TrainingLog, read_nccl, read_program, read_rerun, read_straggler
from outlast.monitors.kernel_events import pci_device, read_kernel_event
from outlast.monitors.kernel_text import KernelLine, parse_kernel_line
from outlast.monitors.reading import Reading
from outlast.monitors.tool_lines import diag_test, read_diag, read_exporter, read_fabric, read_slurm, read_smi
from outlast.monitors.xid_text import BusLossMemory, find_sxid, find_xid

BLOCK_CHARS: Final = 1 << 20
_RANK_PREFIX: Final = re.compile(r"\[?(?:rank|default|trainer)_?[0-9]{1,6}\]?:")
_COMPANION_13: Final = re.compile(r"Graphics Exception: (?:ESR|Shader Program Header)")
_COMPANION_SXID: Final = re.compile(r"^(?:Data \{|Severity [0-9])")
_QUOTED: Final = re.compile(r"\{\"log\":|audit(?:: |\()|[A-Za-z_(][^\s:\[]{0,63}\[[0-9]{1,10}\]: ")
"""The kernel's audit record of a user's words, or what a program with this name and pid prints."""
_TRUNCATED_XID: Final = re.compile(r"NVRM: {0,3}Xid\b|SXid \(PCI")

_TOOLS: Final[tuple[Callable[[str], Reading | None], ...]] = (
    read_fabric,
    read_slurm,
    read_nccl,
    read_straggler,
    read_rerun,
)


class LineReader:
    """Reads one stream of lines. Lines of several nodes may be mixed in it."""

    def __init__(self, *, year: int | None = None) -> None:
        self._year = year
        self._lost = BusLossMemory()
        self._training = TrainingLog()
        self._test = ""
        self._sxid: dict[tuple[int, str | None], bool] = {}

    def read(self, raw: str) -> Reading | None:
        """One line; None where it is none of ours."""
        line = parse_kernel_line(raw, year=self._year)
        if line.program is not None or _RANK_PREFIX.match(raw):
            return self._said_by_program(raw, line)
        text = line.text
        found = self._exporter_or_table(raw) or self._xid(line) or self._sxid_line(line)
        if found is None:
            event = read_kernel_event(text)
            if event is not None:
                found = Reading(kind=event.kind, key=event.key, gpu=pci_device(text), node=line.node, text=text[:2000])
        return found or read_smi(raw) or self._job(raw)

    def read_block(self, text: str) -> Reading | None:
        """Several lines that are one event: the strongest reading of the whole, else of its lines."""
        text = text[:BLOCK_CHARS]
        whole = read_diag(text) or (read_smi(text) if text.count("\n") else None)
        return whole

    def _said_by_program(self, raw: str, line: KernelLine) -> Reading | None:
        """A tag of syslog or the prefix of a rank: hardware words in it are what a program printed."""
        if line.program in ("NVRM",) or (line.program or "").startswith(("nvidia-nvswitch", "nv-fabricmanager")):
            return self._xid(line) or self._sxid_line(line) or read_fabric(raw)
        found = self._job(raw)
        if found is None and ("Xid" in raw or "fallen off the bus" in raw):
            return Reading(kind="not_xid", key="program_text", node=line.node, text=line.text[:2000])
        return found

    def _xid(self, line: KernelLine) -> Reading | None:
        text = line.text
        if ("Xid" in text or "fallen off" in text) and _QUOTED.match(text):
            return Reading(kind="not_xid", key="program_text", node=line.node, text=text[:2000])
        found = self._lost.find(text) or find_xid(text, short_forms=True)
        if found is None:
            if _TRUNCATED_XID.search(text) and "SXid" not in text:
                return Reading(
                    kind="xid", node=line.node, text=text[:2000], unreadable=True, note="no code can be read"
                )
            return None
        return Reading(
            kind="xid",
            code=found.code,
            node=line.node,
            gpu=found.gpu,
            text=text[:2000],
            caused_by=found.caused_by,
            companion=found.code == 13 and bool(_COMPANION_13.search(text)),
        )

    def _sxid_line(self, line: KernelLine) -> Reading | None:
        text = line.text
        found = find_sxid(text)
        if found is None:
            if "SXid (" in text:
                return Reading(
                    kind="sxid", node=line.node, text=text[:2000], unreadable=True, note="no code can be read"
                )
            return None
        companion = bool(_COMPANION_SXID.match(found.text))
        at = (found.code, found.gpu)
        fatal = found.fatal
        if fatal is None:
            fatal = self._sxid.get(at)
        else:
            if len(self._sxid) > 256:
                self._sxid.clear()
            self._sxid[at] = fatal
        return Reading(
            kind="sxid",
            code=found.code,
            node=line.node,
            gpu=found.gpu,
            text=text[:2000],
            companion=companion,
            fatal=fatal,
        )

    def _exporter_or_table(self, raw: str) -> Reading | None:
        if raw.startswith(("DCGM_", "dcgm_")):
            return read_exporter(raw)
        if raw.lstrip().startswith("|"):
            found = read_diag(raw, self._test)
            self._test = diag_test(raw) or self._test
            return found
        return None

    def _job(self, raw: str) -> Reading | None:
        found = self._training.read(raw)
        for reader in _TOOLS:
            if found is not None:
                return found
            found = reader(raw)
        return found or read_program(_RANK_PREFIX.sub("", raw, count=1).strip())
