"""The parts of `outlast judge` put together: cases in, JSON lines out. No click: for the command and for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import msgspec

from outlast.monitors.kernel_text import parse_kernel_line
from outlast.monitors.lines import LineReader
from outlast.monitors.xid_text import find_sxid, find_xid, nvlink_detail, sm_location
from outlast.reliability.catalogue import load_catalogue
from outlast.reliability.judging.case import CaseError, read_case
from outlast.reliability.judging.judge import judge_case
from outlast.reliability.judging.tools import Tools
from outlast.reliability.judging.words import Answer
from outlast.reliability.model import Noun
from outlast.slurm.drain import OWNER
from outlast.slurm.errors import SlurmError
from outlast.slurm.hostlist import expand
from outlast.slurm.node_state import parse_state


class XidDetail(Noun, frozen=True, kw_only=True):
    """An XID or SXid as judging weighs it."""

    code: int
    gpu: str | None = None
    pid: int | None = None
    name: str = ""
    sm: str = ""
    link: int | None = None
    fatal: bool | None = None
    injected: bool = False
    registers: tuple[int, ...] = ()
    switch: int | None = None


def xid_detail(text: str) -> XidDetail | None:
    switch = find_sxid(text)
    if switch is not None:
        return XidDetail(code=switch.code, gpu=switch.gpu, fatal=switch.fatal, link=switch.link, switch=switch.switch)
    found = find_xid(text, short_forms=True)
    if found is None:
        return None
    link = nvlink_detail(found)
    return XidDetail(
        code=found.code,
        gpu=found.gpu,
        pid=found.pid,
        name=found.name,
        sm=sm_location(found),
        link=link.link if link else None,
        fatal=link.fatal if link else None,
        injected=link.injected if link else False,
        registers=link.registers if link else (),
    )


def node_names(text: str) -> tuple[str, ...]:
    """A host list's names. ValueError where it is none."""
    try:
        return expand(text)
    except SlurmError as error:
        raise ValueError(str(error)) from None


@lru_cache(maxsize=4)
def make_tools(site: Path | None = None) -> Tools:
    return Tools(
        catalogue=load_catalogue(site),
        reader=LineReader,
        kernel_line=parse_kernel_line,
        xid=xid_detail,
        names=node_names,
        node_state=parse_state,
        owner=OWNER,
    )


def judge_lines(lines: Iterable[bytes], tools: Tools, *, where: str) -> Iterator[Answer]:
    """One answer a case. CaseError, naming file and line, where one cannot be read."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{where}:{number}"
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CaseError(place, f"not JSON: {error}") from None
        yield judge_case(read_case(raw, place), tools)


def run_judge(source: Iterable[bytes], sink: BinaryIO, *, where: str, site: Path | None = None) -> None:
    for answer in judge_lines(source, make_tools(site), where=where):
        sink.write(msgspec.json.encode(answer) + b"\n")
    sink.flush()
