"""A blocking call beside the event loop, in a thread that cannot hold up the process.

A shared file system may stop a caller for minutes. A thread pool would wait for such a thread at exit, so each call
gets a daemon thread of its own; while one hangs, no second is started.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

T = TypeVar("T")
_NAME: Final = "outlast-aside"


class Aside:
    """One blocking call at a time."""

    def __init__(self) -> None:
        self._running: asyncio.Future[object] | None = None

    async def call(self, work: Callable[[], T], *, timeout_s: float) -> T:
        """What `work` returns or raises. TimeoutError where it, or the call before it, has not come back by then."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        if self._running is not None and not self._running.done():
            await asyncio.wait({self._running}, timeout=timeout_s)
            if not self._running.done():
                raise TimeoutError(f"an earlier call still hangs after {timeout_s:g} s more")
        future: asyncio.Future[T] = loop.create_future()
        self._running = future  # type: ignore[assignment]  # only waited for, its result is never read from here
        threading.Thread(target=_carry, args=(loop, future, work), name=_NAME, daemon=True).start()
        await asyncio.wait({future}, timeout=max(0.0, deadline_s - loop.time()))
        if not future.done():
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        return future.result()


def _carry(loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], work: Callable[[], T]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001  carried to the caller, who knows what it means
        _tell(loop, _fail, future, error)
    else:
        _tell(loop, _settle, future, result)


def _tell(loop: asyncio.AbstractEventLoop, how: Callable[..., None], *args: object) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(how, *args)


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[object], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # a caller that has given up will not look; that is no fault
