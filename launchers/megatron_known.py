"""Faults of megatron-core that were read and reproduced, and which of them the installed one has. Imports no Megatron.

    KNOWN, GUARDED: name -> upstream function, hash of its source as it was read, what it does wrong, what answers it
    look_at_installed(): version and source of each function, from the files alone -> PRESENT | UNREAD | GONE

A fault is called present only where the source is the one that was read; another source is called unread, not sound.
The mends themselves are in megatron_fixes.py, which takes its table from here.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

KNOWN_VERSION: Final = "0.16.1"
PACKAGE: Final = "megatron-core"
_OPTIMIZER: Final = "megatron.core.optimizer.distrib_optimizer"


@dataclass(frozen=True, kw_only=True)
class Known:
    """One upstream fault."""

    name: str
    module: str
    function: str
    """Qualified name inside the module."""
    source_sha256: str
    """First 16 digits, over the source of the function and of those in `relies_on`, as they were read."""
    relies_on: tuple[str, ...] = ()
    """Other functions of the same class whose workings are part of the fault, or taken for granted by the mend."""
    does: str
    """What goes wrong, for a person."""
    answer: str = "mended"
    package: str = PACKAGE
    guarded: bool = False
    """Answered by what outlast does itself, whatever version is installed: nothing of upstream's is wrapped."""

    @property
    def where(self) -> str:
        return f"{self.module}.{self.function}"


KNOWN: Final = (
    Known(
        name="shared_step",
        module=_OPTIMIZER,
        function="DistributedOptimizer.load_state_dict",
        source_sha256="15f257b4c4f9a7ef",
        does="after a restore all parameters share one AdamW step counter, which then runs ahead: losses drift",
    ),
    Known(
        name="fresh_optimizer",
        module=_OPTIMIZER,
        function="DistributedOptimizer.sharded_state_dict",
        source_sha256="2d70893ff7c08a35",
        does="an optimizer that has not stepped yet cannot be loaded into: AssertionError",
    ),
    Known(
        name="step_not_loaded",
        module=_OPTIMIZER,
        function="DistributedOptimizer._set_main_param_and_optimizer_states",
        source_sha256="93c254228283b2df",
        does="the step counter is left out of what is loaded: KeyError 'step'",
    ),
    Known(
        name="padded_buckets",
        module=_OPTIMIZER,
        function="DistributedOptimizer.sharded_param_state_fully_reshardable",
        source_sha256="61a52dde3cb2e08b",
        relies_on=("get_parameter_state_dp_zero", "load_parameter_state_from_fully_reshardable"),
        does="optimizer state in buckets that end in padding comes back with other parameters' values, no error",
        answer="mended, and fingerprints refuse such a restore by tensor name",
    ),
    Known(
        name="persistent_worker",
        module="megatron.core.dist_checkpointing.strategies.async_utils",
        function="AsyncCallsQueue.__init__",
        source_sha256="079d5f5853a4aac3",
        does="a persistent checkpoint worker writes what the next train_step makes of CPU tensors, and the wait for a "
        "dead one has no end",
        answer="refused by name where there is no GPU",
    ),
    Known(
        name="chained_optimizers",
        module="megatron.core.optimizer.optimizer",
        function="ChainedOptimizer.load_state_dict",
        source_sha256="403774c7dde1d546",
        does="optimizer state does not move between ep 1 and more: KeyError, or 'Expected 2 entries'",
    ),
)
"""In the order of the numbers that docs/decisions gives them; each has its mend in megatron_fixes.py."""

GUARDED: Final = (
    Known(
        name="stale_model",
        module="megatron.core.distributed.distributed_data_parallel",
        function="DistributedDataParallel.start_param_sync",
        source_sha256="589a5639a2a883e1",
        does="with overlapped parameter gathering the model that is saved is one train_step older than its optimizer",
        answer="the gathering is finished before each save",
        guarded=True,
    ),
    Known(
        name="missing_gemm",
        module="megatron.core.transformer.moe.moe_utils",
        function="RouterGatingLinearFunction.forward",
        source_sha256="dcba4f9f02b30a36",
        does="without Transformer Engine every expert layer ends with NameError 'te_general_gemm'",
        answer="the name is defined where it is missing",
        guarded=True,
    ),
    Known(
        name="hanging_wait",
        module="megatron.core.dist_checkpointing.strategies.async_utils",
        function="PersistentAsyncCaller.is_current_async_call_done",
        source_sha256="4d5fb1ce709fa7d1",
        does="the wait for a persistent checkpoint worker that died has no end",
        answer="not used: the writer process of a save is watched, and its end is told to all ranks",
        guarded=True,
    ),
    Known(
        name="silent_bit_flip",
        module="torch.distributed.checkpoint.filesystem",
        function="FileSystemReader.read_data",
        source_sha256="86ad890ac621f4f5",
        does="a checkpoint with a flipped bit is loaded without an error: nothing is compared with anything",
        answer="refused: every file has a hash in the manifest, which is looked at while it is read",
        package="torch",
        guarded=True,
    ),
)
"""Faults that need no wrapping: saves and restores of ours go another way, or a call is made beside them."""

SILENT_ASYNC: Final = "Disabling --async-save"
"""What Megatron-LM's arguments.py says, on one rank, before it saves synchronously after all (0.16 and later)."""


def turns_async_off(script: Path) -> bool | None:
    """Whether the Megatron-LM of this script turns --async-save off by itself; None where it cannot be read."""
    try:
        text = (script.parent / "megatron" / "training" / "arguments.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return SILENT_ASYNC in text


class Presence(StrEnum):
    PRESENT = "present"
    UNREAD = "unread"
    """Another source than was read: it may have the fault, or a new one."""
    GONE = "gone"
    """No such function."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the installed package has of one fault."""

    fault: Known
    presence: Presence
    version: str
    digest: str
    """Of the installed source; '' where it is gone."""

    @property
    def is_mended(self) -> bool:
        """Whether the mend applies: to the very version and source that it was written for, where one is needed."""
        return self.fault.guarded or (self.presence is Presence.PRESENT and self.version == KNOWN_VERSION)


def look_at_installed() -> tuple[Seen, ...] | None:
    """Every known fault in the installed packages; None where there is no megatron-core."""
    if _find_package(PACKAGE) is None:
        return None
    found = ((fault, _find_package(fault.package)) for fault in (*KNOWN, *GUARDED))
    return tuple(_look(fault, Path(str(one.locate_file(""))), one.version) for fault, one in found if one is not None)


def _find_package(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _look(fault: Known, site: Path, version: str) -> Seen:
    path = site.joinpath(*fault.module.split(".")).with_suffix(".py")
    try:
        digest = digest_source(path.read_text(encoding="utf-8"), fault.function, fault.relies_on)
    except (OSError, SyntaxError, ValueError):
        digest = ""
    present = Presence.PRESENT if digest == fault.source_sha256 else Presence.UNREAD
    presence = present if digest else Presence.GONE
    return Seen(fault=fault, presence=presence, version=version, digest=digest)


def digest_source(text: str, function: str, relies_on: Iterable[str] = ()) -> str:
    """The same as megatron_fixes.source_digest, from a module's text; '' where the function is gone."""
    *owners, name = function.split(".")
    lines, body = text.splitlines(keepends=True), ast.parse(text).body
    for owner in owners:
        found = [node for node in body if isinstance(node, ast.ClassDef) and node.name == owner]
        body = found[-1].body if found else []
    functions = {n.name: n for n in body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    if name not in functions:
        return ""
    digest = hashlib.sha256()
    for one in (name, *relies_on):
        node = functions.get(one)
        digest.update("".join(_lines_of(node, lines)).encode() if node is not None else b"-")
    return digest.hexdigest()[:16]


def _lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> list[str]:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return lines[first - 1 : node.end_lineno]
