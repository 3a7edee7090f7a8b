"""The readers of single lines and lists that judging is given, since rooms do not import each other. Pure: Protocols.

The real ones are monitors/lines.py, xid_text.py, kernel_text.py and slurm/hostlist.py, node_state.py; cli/judge_io.py
puts them together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from outlast.reliability.catalogue import Catalogue
from outlast.reliability.classify import Reader


class KernelText(Protocol):
    @property
    def text(self) -> str: ...
    @property
    def at_s(self) -> float | None: ...
    @property
    def uptime_s(self) -> float | None: ...
    @property
    def node(self) -> str | None: ...
    @property
    def program(self) -> str | None: ...
    @property
    def repeats(self) -> int: ...


class XidText(Protocol):
    @property
    def code(self) -> int: ...
    @property
    def gpu(self) -> str | None: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def name(self) -> str: ...
    @property
    def sm(self) -> str: ...
    @property
    def link(self) -> int | None: ...
    @property
    def fatal(self) -> bool | None: ...
    @property
    def injected(self) -> bool: ...
    @property
    def registers(self) -> tuple[int, ...]: ...
    @property
    def switch(self) -> int | None: ...


@dataclass(frozen=True)
class Tools:
    catalogue: Catalogue
    reader: Callable[[], Reader]
    """A new reader of lines, for one case."""
    kernel_line: Callable[[str], KernelText]
    xid: Callable[[str], XidText | None]
    """The details of an XID or SXid in a message."""
    names: Callable[[str], tuple[str, ...]]
    """A host list's names; ValueError where it is none."""
    node_state: Callable[[str], tuple[str, tuple[str, ...]]]
    owner: str
    """What begins our own reasons in Slurm."""
