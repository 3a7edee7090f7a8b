"""A dcgm-exporter's page, fetched again and again: states and XIDs of this node's GPUs, and its silence as a signal.

    http://127.0.0.1:9400/metrics  --thread, deadline, size limit-->  exporter_page.py  ->  dcgm.py  ->  signals

One thread at a time: where a name server or a proxy does not come back, no second request is started beside the first.
No redirect is followed and no proxy is asked. It reports and never judges.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Final
from urllib.parse import urlsplit

from outlast.monitors.dcgm import WANTED, ExporterMemory, Found
from outlast.monitors.exporter_page import PAGE_BYTES, Page, PageReader
from outlast.reliability.model import Node

LOCAL: Final = "http://127.0.0.1:9400/metrics"
"""Where dcgm-exporter listens by itself."""
POLL_S: Final = 15.0
"""An exporter reads its GPUs every 30 s unless it is told otherwise."""
ANSWER_S: Final = 10.0
CHUNK_BYTES: Final = 1 << 16


class NoPage(Exception):
    """Why there is no page just now."""


def url_of(setting: str, node: Node) -> str:
    """The URL that a run file's setting means on this node; '' : none."""
    return LOCAL if setting == "local" else setting.replace("%n", node)


def fetch_page(url: str, *, answer_s: float = ANSWER_S, limit_bytes: int = PAGE_BYTES) -> bytes:
    """The page, whole. Blocks for twice `answer_s` at most, however slowly it drips; NoPage says why there is none."""
    late = threading.Event()
    try:
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=answer_s)
        connection.connect()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _no_page(error, answer_s) from None
    # a time-out of the socket begins anew with each byte: this one does not
    timer = threading.Timer(answer_s, _hang_up, (connection.sock, late))
    timer.daemon = True
    timer.start()
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request("GET", path, headers={"Accept": "text/plain", "Connection": "close"})
        page = _read(connection.getresponse(), limit_bytes)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _no_page(TimeoutError() if late.is_set() else error, answer_s) from None
    finally:
        timer.cancel()
        connection.close()
    if late.is_set():
        raise _no_page(TimeoutError(), answer_s)
    return page


def _hang_up(sock: socket.socket, late: threading.Event) -> None:
    late.set()
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _no_page(error: Exception, answer_s: float) -> NoPage:
    if isinstance(error, TimeoutError):
        return NoPage(f"no answer within {answer_s:g} s")
    text = getattr(error, "strerror", None) or str(error)
    return NoPage(f"{type(error).__name__}: {text}"[:200])


def _read(answer: http.client.HTTPResponse, limit_bytes: int) -> bytes:
    if answer.status != 200:
        raise NoPage(f"HTTP {answer.status} {answer.reason}"[:120])
    if answer.getheader("Content-Encoding", "identity") != "identity":
        raise NoPage("a compressed page, which was not asked for")
    page = bytearray()
    while chunk := answer.read1(CHUNK_BYTES):
        page += chunk
        if len(page) > limit_bytes:
            raise NoPage(f"a page of more than {limit_bytes:,} bytes")
    if answer.length:
        raise NoPage(f"the page was cut short: {answer.length:,} bytes are missing")
    return bytes(page)


class ExporterWatch:
    """`async for found in ExporterWatch(node, url).signals()`, for ever."""

    def __init__(
        self,
        node: Node,
        url: str,
        *,
        poll_s: float = POLL_S,
        answer_s: float = ANSWER_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._url, self._poll_s, self._answer_s, self._clock = url, poll_s, answer_s, clock
        self._memory = ExporterMemory(node)
        self._reader = PageReader(wanted=WANTED)

    async def signals(self) -> AsyncIterator[Found]:
        while True:
            work = asyncio.ensure_future(asyncio.to_thread(self._look))
            done, _ = await asyncio.wait({work}, timeout=3 * self._answer_s)
            if not done:
                for found in self._memory.silent(f"{self._url}: does not come back", self._clock()):
                    yield found
            page = await work
            at_s = self._clock()
            told = self._memory.silent(page, at_s) if isinstance(page, str) else self._memory.take(page, at_s)
            for found in told:
                yield found
            await asyncio.sleep(self._poll_s)

    def _look(self) -> Page | str:
        """In a thread: the page, read; or why there is none."""
        try:
            return self._reader.read(fetch_page(self._url, answer_s=self._answer_s))
        except NoPage as error:
            return f"{self._url}: {error}"
