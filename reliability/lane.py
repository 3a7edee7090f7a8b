"""Calls to something that may never answer (a file system that hangs): one at a time, each with a deadline. An edge.

    ask(what, timeout_s) --> a thread of its own --> answer, or PortError(again=True) when the deadline has passed

A thread that hangs in the kernel cannot be stopped. So nobody waits for it, not even the interpreter's end (it is a
daemon), no thread of the pool that serves everything else is spent on it, and while it hangs no second one is made:
the next ask() is refused at once, in words. When it comes back, asking goes on. A child process that could be killed
would not be better: the same read holds it in the kernel, and it would not know what was hashed before.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from outlast.reliability.ports import PortError

T = TypeVar("T")


class Lane(Executor):
    """One thing that is asked one question at a time."""

    def __init__(self, name: str) -> None:
        """`name`: for messages, such as `the checkpoint store`."""
        self.name = name
        self._busy_since_mono_s: float | None = None

    @property
    def busy_s(self) -> float | None:
        """For how long the last question has had no answer; None where it has one."""
        since = self._busy_since_mono_s
        return None if since is None else time.monotonic() - since

    async def ask(self, what: Callable[[], T], *, timeout_s: float) -> T:
        """The answer. PortError(again=True) where none came in time, or where the last question still has none."""
        if self.busy_s is not None:
            raise PortError(
                f"{self.name} has not answered the last call for {self.busy_s:.0f} s; "
                "no other is made before it does. Look at its file system",
                again=True,
            )
        try:
            return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(self, what), timeout_s)
        except TimeoutError:
            raise PortError(f"no answer of {self.name} within {timeout_s:.0f} s", again=True) from None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As executors do; for run_in_executor."""
        future: Future[Any] = Future()
        self._busy_since_mono_s = time.monotonic()

        def work() -> None:
            try:
                result, error = fn(*args, **kwargs), None
            except BaseException as e:  # noqa: BLE001 -- handed on, as an executor does
                result, error = None, e
            self._busy_since_mono_s = None
            if not future.set_running_or_notify_cancel():
                return  # nobody waits any more
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=work, name=self.name, daemon=True).start()
        return future
