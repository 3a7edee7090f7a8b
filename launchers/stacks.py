"""Stacks of ranks from outside, by py-spy, and whether a stack waits for somebody.

`py-spy dump --nonblocking` also works on a stopped process (a plain dump does not return) and never stops a healthy
one. It reads memory while the program runs, so it may fail or be torn: then there is no stack, which is not a fact
about the rank. `is_waiting` looks at names alone; whom a hang is blamed on is decided elsewhere, over all ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outlast.launchers.held import HeldRank
from outlast.launchers.reap import read_proc
from outlast.reliability.wire import RankStack

DUMP_S = 10.0
STACK_CHARS = 4000
_TRIES = 3
_INNER_FRAMES = 4
_THREAD = re.compile(r'Thread \S+(?: \(([^)]*)\))?(?:: "([^"]*)")?')
_FRAME = re.compile(r"    (?P<name>.+) \((?P<file>.+?)(?::(?P<line>\d+))?\)$")
_WAITS = re.compile(
    r"(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|barrier|gather|scatter|wait|i?recv|i?send|"
    r"synchronize|start_grad_sync|finish_grad_sync|start_param_sync|finish_param_sync|_communicate|init_process_group|"
    r"rendezvous|_store_based_barrier|_new_process_group_helper)"
)
_LIBRARIES = ("torch/distributed/", "torch/cuda/", "megatron/core/")


@dataclass(frozen=True, kw_only=True)
class Frame:
    name: str
    file: str
    line: int


@dataclass(frozen=True, kw_only=True)
class ThreadStack:
    name: str
    frames: tuple[Frame, ...]
    """Innermost first, as py-spy prints them."""


def parse_dump(text: str) -> tuple[ThreadStack, ...]:
    """py-spy's dump. Lines in any other form are passed over."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if line.startswith("Thread") and (head := _THREAD.match(line)):
            threads.append((head[2] or "", []))
        elif threads and (m := _FRAME.match(line)):
            threads[-1][1].append(Frame(name=m["name"], file=m["file"], line=int(m["line"] or 0)))
    return tuple(ThreadStack(name=name, frames=tuple(frames)) for name, frames in threads)


def main_thread(threads: Sequence[ThreadStack]) -> ThreadStack | None:
    """The one called so; else the first: py-spy cannot always read names."""
    return next((t for t in threads if t.name == "MainThread"), threads[0] if threads else None)


def is_waiting(threads: Sequence[ThreadStack], process_state: str) -> bool | None:
    """Whether it waits for a peer or a device; None without a stack. A stopped process waits for nobody."""
    if process_state in ("T", "t", "Z"):
        return False
    main = main_thread(threads)
    if main is None or not main.frames:
        return None
    # backward runs its collectives in autograd's own threads on a GPU
    engines = [t for t in threads if t.name.startswith("pt_autograd") and t.frames]
    return any(_frames_wait(t.frames) for t in (main, *engines))


def _frames_wait(frames: Sequence[Frame]) -> bool:
    return any(
        any(library in f.file for library in _LIBRARIES) and _WAITS.fullmatch(f.name.rsplit(".", 1)[-1])
        for f in frames[:_INNER_FRAMES]
    )


def render(threads: Sequence[ThreadStack]) -> str:
    """The main thread's stack for a person, innermost last, its inner end kept where it is too long."""
    main = main_thread(threads)
    frames = main.frames if main else ()
    lines = [f"{f.name} ({f.file}:{f.line})" for f in reversed(frames)]
    return "\n".join(lines)[-STACK_CHARS:]


async def collect(held: HeldRank, *, now_mono_s: float, directory: Path) -> RankStack:
    """One rank's stack now; the whole dump is kept as stack.txt beside its log, where that can be written."""
    pid = held.proc.pid if held.proc else 0
    state = _state(held)
    dump, why = ("", "the process is gone") if not state else await dump_stack(pid)
    state = _state(held)  # anew: a stop that was under way has arrived by now
    threads = parse_dump(dump)
    if dump:
        # a thread of its own: the shared file system may never answer
        threading.Thread(target=_keep, args=(directory, dump), daemon=True).start()
    return RankStack(
        attempt=held.attempt,
        rank=held.rank,
        process_state=state,
        waiting=is_waiting(threads, state) if state else False,
        phase=held.phase,
        train_step=held.train_step,
        still_s=max(0.0, now_mono_s - held.moved_mono_s),
        stack=render(threads) or f"no stack: {why}"[:STACK_CHARS],
    )


async def dump_stack(pid: int) -> tuple[str, str]:
    """(dump, '') or ('', why there is none). Bounded by DUMP_S a try."""
    spy = shutil.which("py-spy", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    if spy is None:
        return "", "py-spy is not installed on this node"
    why = ""
    for _ in range(_TRIES):  # a dump of a running process may be torn; the next one seldom is
        process = await asyncio.create_subprocess_exec(
            *(spy, "dump", "--nonblocking", "--pid", str(pid)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), DUMP_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            return "", f"py-spy did not answer within {DUMP_S:.0f} s"
        text = out.decode(errors="backslashreplace")
        if process.returncode == 0 and any(t.frames for t in parse_dump(text)):
            return text, ""
        why = err.decode(errors="backslashreplace").strip()[-400:] or "py-spy printed no frames"
    return "", why


def _state(held: HeldRank) -> str:
    """As /proc says; '' where the process is gone or its number is another's."""
    if held.proc is None or held.status is not None:
        return ""
    now = read_proc(held.proc.pid)
    return now.state if now is not None and now.start_ticks == held.proc.start_ticks else ""


def _keep(directory: Path, dump: str) -> None:
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        (directory / "stack.txt").write_text(dump)
