"""XID and SXid in the text of a kernel message, in the forms of all driver generations. Pure.

    NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
    NVRM: Xid (0000:41:00): 13, 0005 00000000 ...                       before 2014: no PCI:, no pid
    NVRM: Xid (PCI:0000:3f:00): 46                                      nothing after the code
    NVRM: Xid (PCI:0000:9b:00 GPU-I:03 GPU-CI:00): 94, pid=71, ...      a MIG instance
    NVRM: Xid (PCI:0000:3b:00): 45, pid=71, ... caused by previous Xid 94
    nvidia-nvswitch2: SXid (PCI:0000:85:00.0): 12028, Non-fatal, Link 61 ...

Not a judge: what a code means is data (reliability/catalog). A GPU that fell off the bus without the word Xid is
reported as 79, since a driver that loses the GPU early writes no code at all.
"""

from __future__ import annotations

import re
from typing import Final

from outlast.reliability.model import Noun

BUS_LOSS: Final = 79
RECOVERY: Final = 154
"""Codes whose severity stands in the line's word, not in the code."""

_XID: Final = re.compile(
    r"(?:NVRM: {0,3})?Xid:? {0,2}\((?:PCI:)?(?P<pci>[0-9a-fA-F:.]{3,24})"
    r"(?: GPU-I:(?P<gi>[0-9]{1,4}))?(?: GPU-CI:(?P<ci>[0-9]{1,4}))?\): {0,3}"
    r"(?P<code>[0-9]{1,6})(?![0-9])(?P<rest>.{0,4096})",
    re.DOTALL,
)
_XID_BARE: Final = re.compile(
    r"NVRM: {0,3}Xid:? {1,2}(?P<code>[0-9]{1,6})(?![0-9]),? {0,2}"
    r"(?:PCI:(?P<pci>[0-9a-fA-F:.]{3,24}))?(?P<rest>.{0,4096})",
    re.DOTALL,
)
_XID_SHORT: Final = re.compile(
    r"\bXid {1,2}(?P<code>[0-9]{1,6}) \(?PCI:(?P<pci>[0-9a-fA-F:.]{3,24})\)?(?P<rest>.{0,4096})", re.DOTALL
)
_OTHER_CASE: Final = re.compile(
    r"\b(?:nvrm(?=: {0,3}xid\b)|xid(?=:? {0,2}\()|(?<=\()pci(?=:[0-9a-f]{4}))", re.IGNORECASE
)
"""A collector on the way may have changed the case."""
_AS_PRINTED: Final = {"nvrm": "NVRM", "xid": "Xid", "pci": "PCI"}
_SXID: Final = re.compile(
    r"nvidia-nvswitch(?P<index>[0-9]{1,3}): SXid \(PCI:(?P<pci>[0-9a-fA-F:.]{3,24})\): (?P<code>[0-9]{1,6})(?![0-9])"
    r"(?P<rest>.{0,4096})",
    re.DOTALL,
)
_PID: Final = re.compile(r"pid='?([0-9]{1,10})'?")
_NAME: Final = re.compile(r"\bname=([^,\n]{1,64}?)(?:,|$)")
_CAUSED_BY: Final = re.compile(r"caused by previous Xid ([0-9]{1,6})")
_FALLEN: Final = re.compile(r"fallen off the bus")
_GPU_NAMED: Final = re.compile(
    r"(?:GPU(?: at)? |PCI:)\(?(?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-9a-fA-F])?)"
)
_PCI: Final = re.compile(r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})(?:\.[0-9a-fA-F])?$")
_RECOVERY: Final = re.compile(
    r"recovery action changed from [^()]{0,16}\(([^()]{1,48})\) to [^()]{0,16}\(([^()]{1,48})\)"
)
_NVLINK5: Final = re.compile(
    r"(?P<unit>[A-Z][A-Z0-9_]{2,40}) {1,4}(?P<word>Nonfatal|Non-fatal|(?:Link )?Fatal|fatal|nonfatal) {1,4}"
    r"XC(?P<xc>[0-9]) i(?P<inj>[0-9]) "
    r"Link {1,2}(?P<link>-?[0-9]{1,3}) {0,2}(?:\((?P<regs>[0-9a-fA-Fx, ]{0,120}))?"
)
_NVLINK4: Final = re.compile(r"link {1,2}([0-9]{1,3}) {0,2}\(((?:0x[0-9a-fA-F]{1,8}(?:, )?){1,8})\)")
_SM: Final = re.compile(r"\(?GPC ([0-9]{1,3}), TPC ([0-9]{1,3})(?:, SM ([0-9]{1,3}))?")


class XidFound(Noun, frozen=True, kw_only=True):
    """One XID as a line prints it."""

    code: int
    gpu: str | None = None
    """dddd:bb:dd, lower case."""
    pid: int | None = None
    name: str = ""
    caused_by: int | None = None
    instance: str = ""
    """MIG: `gi` or `gi/ci`."""
    text: str = ""
    """What follows the code."""
    worded: bool = False
    """True: told by words alone, without a code."""


class SxidFound(Noun, frozen=True, kw_only=True):
    """One SXid (NVSwitch) as a line prints it."""

    code: int
    switch: int
    gpu: str | None = None
    """The switch's own PCI address."""
    fatal: bool | None = None
    """By the line's own word; None on companion lines (Severity, Data), which print none."""
    link: int | None = None
    text: str = ""


class NvlinkDetail(Noun, frozen=True, kw_only=True):
    """What an NVLink XID (74, 144-150) says beyond its code."""

    link: int
    fatal: bool | None = None
    unit: str = ""
    injected: bool = False
    """The fault was injected on purpose (i1): a drill."""
    registers: tuple[int, ...] = ()

    @property
    def subcode(self) -> int | None:
        """Bits 20-25 of the first register (IntrInfo) on NVLink 5; its meaning changes at driver R575."""
        return (self.registers[0] >> 20) & 0x3F if self.registers else None


def normalise_pci(text: str) -> str | None:
    """`0000:3b:00`, from any of `PCI:0000:3b:00`, `00000000:3B:00.0`, `3b:00.0`; None where it is no address."""
    m = _PCI.match(text.strip().removeprefix("PCI:"))
    if not m:
        return None
    return f"{int(m[1] or '0', 16):04x}:{int(m[2], 16):02x}:{int(m[3], 16):02x}"


def find_xid(text: str, *, short_forms: bool = False) -> XidFound | None:
    """The XID of this message, or None. `short_forms`: also as people retype it (`Xid 31 PCI:0000:f0:00`)."""
    if "Xid" not in text:
        if not _OTHER_CASE.search(text):
            return find_bus_loss(text) if "fallen off the bus" in text else None
        text = _OTHER_CASE.sub(lambda m: _AS_PRINTED[m[0].lower()], text)
    m = _XID.search(text) or _XID_BARE.search(text) or (_XID_SHORT.search(text) if short_forms else None)
    # `nvidia-nvswitch0: SXid (PCI` holds the same letters
    if m is None or (m.start() and text[m.start() - 1] == "S"):
        return None
    groups = m.groupdict()
    rest = groups["rest"].lstrip(" ,")
    pid, name, cause = _PID.search(rest[:64]), _NAME.search(rest[:160]), _CAUSED_BY.search(rest)
    instance = "/".join(p for p in (groups.get("gi"), groups.get("ci")) if p)
    return XidFound(
        code=int(groups["code"]),
        gpu=normalise_pci(groups["pci"] or ""),
        pid=int(pid[1]) if pid else None,
        name="" if name is None or "unknown" in name[1] else name[1],
        caused_by=int(cause[1]) if cause else None,
        instance=instance,
        text=rest,
    )


def find_bus_loss(text: str) -> XidFound | None:
    """`GPU 0000:3b:00.0: GPU has fallen off the bus` and the last line of the driver's three-line form."""
    if not _FALLEN.search(text) or not ("NVRM" in text or "GPU" in text):
        return None
    m = _GPU_NAMED.search(text)
    return XidFound(code=BUS_LOSS, gpu=normalise_pci(m[1]) if m else None, text=text[:4096], worded=True)


class BusLossMemory:
    """The three-line form names the GPU in its first line and the loss in its last: remember it for a few lines."""

    def __init__(self) -> None:
        self._gpu: str | None = None
        self._left = 0

    def find(self, text: str) -> XidFound | None:
        """As find_xid, with the GPU filled in from the lines just before."""
        found = find_xid(text)
        if found is not None and found.worded and found.gpu is None and self._left > 0:
            found = XidFound(code=found.code, gpu=self._gpu, text=found.text, worded=True)
        self._left -= 1
        if "The NVIDIA GPU" in text:
            m = _GPU_NAMED.search(text)
            self._gpu, self._left = (normalise_pci(m[1]) if m else None), 4
        return found


def find_sxid(text: str) -> SxidFound | None:
    if "SXid" not in text:
        return None
    m = _SXID.search(text)
    if not m:
        return None
    rest = m["rest"].lstrip(" ,")
    head = rest[:16].lower()
    fatal = False if head.startswith(("non-fatal", "nonfatal")) else True if head.startswith("fatal") else None
    link = re.search(r"\bLink ([0-9]{1,3})\b", rest)
    return SxidFound(
        code=int(m["code"]),
        switch=int(m["index"]),
        gpu=normalise_pci(m["pci"]),
        fatal=fatal,
        link=int(link[1]) if link else None,
        text=rest,
    )


def recovery_text(found: XidFound) -> str | None:
    """XID 154: the action that the driver now asks for, as it words it; None where the line is cut short."""
    m = _RECOVERY.search(found.text)
    return m[2].strip() if m else None


def nvlink_detail(found: XidFound) -> NvlinkDetail | None:
    """Link, severity word and registers of an NVLink XID; None where the line has none of it."""
    m = _NVLINK5.search(found.text)
    if m:
        registers = tuple(int(r, 16) for r in re.findall(r"0x([0-9a-fA-F]{1,8})", m["regs"] or ""))
        return NvlinkDetail(
            link=int(m["link"]),
            fatal=not m["word"].lower().startswith("non"),
            unit=m["unit"],
            injected=m["inj"] != "0",
            registers=registers,
        )
    m = _NVLINK4.search(found.text)
    if m:
        registers = tuple(int(r, 16) for r in re.findall(r"0x([0-9a-fA-F]{1,8})", m[2]))
        return NvlinkDetail(link=int(m[1]), fatal="fatal error" in found.text or None, registers=registers)
    return None


def sm_location(found: XidFound) -> str:
    """XID 13: `GPC/TPC/SM` of the unit that stopped; '' where the line names none."""
    m = _SM.search(found.text)
    return f"{m[1]}/{m[2]}/{m[3]}" if m and m[3] else f"{m[1]}/{m[2]}" if m else ""
