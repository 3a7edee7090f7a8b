"""The start of a rank: from a fork of the warm process to the user's script, as if `python script.py` had been typed.

Own session and group, environment, working directory, output into the agent's pipe, signals as Python sets them,
the step recorder installed, then the script as `__main__`; its exit code is the process's. It never returns.
It does not choose anything: the agent composed the request. The script is not edited and need not know of outlast.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import os
import runpy
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NoReturn

from outlast.launchers import reap, recorder
from outlast.launchers.warm_wire import ForkRank

ADAPTER_ENV = "OUTLAST_ADAPTER"
CANNOT_RUN = 126
NOT_FOUND = 127
"""As shells say it."""


def become(request: ForkRank, *, output: int, warm_pid: int, close_fds: Sequence[int]) -> NoReturn:
    """Turn this forked process into the rank. Whatever happens, the warm process's code is not returned to."""
    code = 1
    try:
        os.setsid()
        if not reap.die_with_parent(warm_pid):
            os._exit(1)
        _reset_signals()
        _redirect(output, close_fds)
        _enter(request)
        recorder.install()
        code = exit_code_of(_arm) or _run(request)
    except BaseException:  # noqa: BLE001 (nothing may unwind into the parent's frames)
        traceback.print_exc()
    finally:
        _finish()
        os._exit(code)


def _reset_signals() -> None:
    """As a fresh interpreter has them. The wake-up pipe is the parent's."""
    signal.set_wakeup_fd(-1)
    for posix_signal in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(posix_signal, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _redirect(output: int, close_fds: Sequence[int]) -> None:
    """stdin from nowhere, stdout and stderr into the agent's pipe, in one stream so that their order is kept."""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for fd in {nowhere, output, *close_fds} - {0, 1, 2}:
        os.close(fd)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False))  # type: ignore[misc]
    # line by line, unlike `python script.py` into a pipe: last words count more than a few system calls
    sys.stdout = sys.__stdout__ = _text_out(1, "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text_out(2, "backslashreplace")  # type: ignore[misc]


def _text_out(fd: int, errors: str) -> io.TextIOWrapper:
    raw = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=True)


def _enter(request: ForkRank) -> None:
    """Environment and working directory, also for what the imported modules had read before the fork."""
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.workdir)
    for place in reversed([p for p in request.env.get("PYTHONPATH", "").split(os.pathsep) if p]):
        if place not in sys.path:
            sys.path.insert(1, place)
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        vars(process)["ORIGINAL_DIR"] = request.workdir  # else spawned children look for __main__ in the agent's place
    _reseed()


def _reseed() -> None:
    """Undo what all forks of one process would share. (torch is deterministic until seeded; random heals itself.)"""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and threads.isdigit() and int(threads) > 0:
        torch.set_num_threads(int(threads))


def _arm() -> None:
    """What an adapter puts around the program before it runs: `arm()` of the module that it names."""
    adapter = os.environ.get(ADAPTER_ENV, "")
    if adapter.startswith("outlast."):
        importlib.import_module(adapter).arm()


def _run(request: ForkRank) -> int:
    """The program, and its exit code."""
    sys.argv = list(request.argv)
    match request.kind:
        case "command":
            return _exec(request.argv)
        case "module":
            sys.path.insert(0, os.getcwd())
            # the warm process may have imported it; it is executed anew all the same
            warnings.filterwarnings("ignore", message=".*found in sys.modules", module="runpy")
            return exit_code_of(lambda: runpy.run_module(request.target, run_name="__main__", alter_sys=True))
        case _:
            path = os.path.abspath(request.target)
            sys.path.insert(0, os.path.dirname(path))
            return exit_code_of(lambda: runpy.run_path(path, run_name="__main__"))


def _exec(argv: Sequence[str]) -> int:
    """Replace this process; returns only where that fails."""
    for posix_signal in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(posix_signal, signal.SIG_DFL)  # Python ignores them; other programs count on them
    try:
        os.execvp(argv[0], list(argv))
    except OSError as e:
        sys.stderr.write(f"outlast: cannot run {argv[0]!r}: {e.strerror}; see task.command in the run file\n")
        return NOT_FOUND if isinstance(e, FileNotFoundError) else CANNOT_RUN


def exit_code_of(program: Callable[[], object]) -> int:
    """Run it and give the exit code that the interpreter would: SystemExit's, or 1 after a traceback."""
    try:
        program()
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int):
            return (e.code or 0) & 0xFF
        sys.stderr.write(f"{e.code}\n")
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return 130
    except BaseException as e:  # noqa: BLE001 (the program's own error, shown as the interpreter shows it)
        e.__traceback__ = _own_frames(e.__traceback__)
        sys.excepthook(type(e), e, e.__traceback__)
        return 1
    return 0


def _own_frames(tb: TracebackType | None) -> TracebackType | None:
    """The program's frames, without this file's and runpy's above them."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    start = tb
    while start is not None and start.tb_frame.f_code.co_filename in ours:
        start = start.tb_next
    return start if start is not None else tb


def _finish() -> None:
    """What the interpreter does at its end, but for the teardown of modules: threads, atexit, children, buffers."""
    steps: list[Callable[[], object]] = [threading._shutdown, atexit._run_exitfuncs]  # type: ignore[attr-defined]
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        # ends Manager children, which would else stay behind holding our output pipe
        steps.append(util._exit_function)
    steps += [sys.stdout.flush, sys.stderr.flush]
    for step in steps:
        try:
            step()
        except BaseException:  # noqa: BLE001 (each of the others must still be done)
            _say_quietly(traceback.format_exc())


def _say_quietly(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))
