"""A page fetched over real HTTP: what is new on it becomes signals, and what keeps it away is blindness, in time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outlast.monitors.exporter import LOCAL, ExporterWatch, NoPage, fetch_page, url_of
from outlast.reliability.model import GpuChanged, Node, SourceBlind, XidSeen

NODE = Node("n7")
Serve = Callable[[socket.socket], None]


def page(xid: int = 0, remap_failed: int = 0, ecc: int = 0, gpus: int = 2, without: str = "") -> bytes:
    lines = []
    for metric, value in (
        ("DCGM_FI_DEV_XID_ERRORS", xid),
        ("DCGM_FI_DEV_ROW_REMAP_FAILURE", remap_failed),
        ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", ecc),
        ("DCGM_FI_DEV_GPU_TEMP", 50),
    ):
        for gpu in range(0 if metric == without else gpus):
            labels = f'gpu="{gpu}",UUID="GPU-{gpu}",pci_bus_id="00000000:{0x1A + gpu:02X}:00.0",Hostname="n7"'
            lines.append(f"{metric}{{{labels}}} {value if gpu == 0 else 0}")
    return "\n".join(lines).encode() + b"\n"


def answer(body: bytes, status: str = "200 OK", *, length: int | None = None, more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body) if length is None else length}"
    return f"{head}\r\n{more}\r\n".encode() + body


class Exporter:
    """A server of one's own on loopback. What it does with the next request is `serve`."""

    def __init__(self) -> None:
        self.body, self.requests = page(), 0
        self.serve: Serve = self.send_body
        self._open()

    def _open(self, port: int = 0) -> None:
        self.listener = socket.create_server(("127.0.0.1", port))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/metrics"

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(10)
            connection.recv(4096)
            self.requests += 1
            self.serve(connection)

    def send_body(self, connection: socket.socket) -> None:
        connection.sendall(answer(self.body))

    def send(self, raw: bytes) -> None:
        self.serve = lambda connection: connection.sendall(raw)

    def stop(self) -> None:
        # a thread that waits in accept keeps the socket until it is woken
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def start(self) -> None:
        self._open(self.port)


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    server = Exporter()
    yield server
    server.stop()


def refused(exporter: Exporter, **limits: Any) -> str:
    began_s = time.monotonic()
    with pytest.raises(NoPage) as why:
        fetch_page(exporter.url, **limits)
    assert time.monotonic() - began_s < 8
    return str(why.value)


# ---------------------------------------------------------------- one page


def test_a_page_is_fetched_whole(exporter: Exporter) -> None:
    assert fetch_page(exporter.url) == page()
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    exporter.send(chunked)
    assert fetch_page(exporter.url) == b"abcde"
    exporter.send(b"HTTP/1.0 200 OK\r\n\r\nuntil the end")
    assert fetch_page(exporter.url) == b"until the end"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (answer(b"", "503 Service Unavailable"), "HTTP 503"),
        (answer(b"", "302 Found", more="Location: http://127.0.0.1:1/\r\n"), "HTTP 302"),
        (answer(page(), length=1_000_000), "cut short"),
        (answer(page(), more="Content-Encoding: gzip\r\n"), "compressed"),
        (b"\x00\xff\x16\x03 no HTTP at all\r\n\r\n", "BadStatusLine"),
        (b"", "RemoteDisconnected"),
    ],
)
def test_what_is_no_page_says_why(exporter: Exporter, raw: bytes, said: str) -> None:
    exporter.send(raw)
    assert said in refused(exporter)


def test_a_page_without_end_is_not_gathered(exporter: Exporter) -> None:
    def flood(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(10_000):
            connection.sendall(b"x" * 10_000)

    exporter.serve = flood
    assert "more than 1,000,000 bytes" in refused(exporter, limit_bytes=1_000_000)


@pytest.mark.slow
@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nX-Slow: ", b"HTTP/1.1 200 OK\r\n\r\n", b""])
def test_a_server_that_drips_costs_its_deadline_and_no_more(exporter: Exporter, head: bytes) -> None:
    def drip(connection: socket.socket) -> None:
        connection.sendall(head)
        for _ in range(100):
            connection.sendall(b"H")
            time.sleep(0.1)

    exporter.serve = drip
    began_s = time.monotonic()
    assert "no answer within 0.5 s" in refused(exporter, answer_s=0.5)
    assert time.monotonic() - began_s < 3


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    with pytest.raises(NoPage, match="ConnectionRefusedError"):
        fetch_page(f"http://127.0.0.1:{port}/metrics")


@pytest.mark.parametrize("url", ["http://", "http://[::1", "http://127.0.0.1:99999/x", "http://a b/x", "http://\x00/"])
def test_a_url_that_leads_nowhere_is_no_page(url: str) -> None:
    with pytest.raises(NoPage):
        fetch_page(url, answer_s=2)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=300) | st.binary(max_size=200).map(lambda b: b"HTTP/1.1 200 OK\r\n" + b))
def test_any_bytes_are_a_page_or_none(exporter: Exporter, raw: bytes) -> None:
    exporter.send(raw)
    try:
        assert isinstance(fetch_page(exporter.url, answer_s=5), bytes)
    except NoPage as why:
        assert str(why)


def test_what_the_run_file_says() -> None:
    assert url_of("", NODE) == ""
    assert url_of("local", NODE) == LOCAL
    assert url_of("http://%n:9400/metrics", NODE) == "http://n7:9400/metrics"


# ---------------------------------------------------------------- page after page


class Watched:
    def __init__(self, exporter: Exporter) -> None:
        self.found: list[Any] = []
        self.watch = ExporterWatch(NODE, exporter.url, poll_s=0.02, answer_s=1.0)
        self.exporter = exporter

    async def listen(self) -> None:
        async for found in self.watch.signals():
            self.found.append(found)

    async def until(self, what: Callable[[], Any]) -> Any:
        end = time.monotonic() + 15
        while time.monotonic() < end:
            if got := what():
                return got
            await asyncio.sleep(0.01)
        pytest.fail(f"in vain; found {self.found}")

    async def looked(self, times: int = 2) -> None:
        """The page as it is now was fetched, and taken up."""
        asked = self.exporter.requests
        await self.until(lambda: self.exporter.requests >= asked + times)

    def codes(self) -> list[int]:
        return [f.code for f in self.found if isinstance(f, XidSeen)]

    def changed(self) -> list[tuple[str, str, int]]:
        return [(f.gpu, f.field, f.now) for f in self.found if isinstance(f, GpuChanged)]

    def blind(self) -> list[str]:
        return [f.why for f in self.found if isinstance(f, SourceBlind)]


def play(exporter: Exporter, story: Callable[[Watched], Any]) -> Watched:
    watched = Watched(exporter)

    async def main() -> None:
        task = asyncio.create_task(watched.listen())
        try:
            await story(watched)
        finally:
            task.cancel()
            await asyncio.wait([task], timeout=10)

    asyncio.run(main())
    assert all(f.node == NODE for f in watched.found)
    return watched


@pytest.mark.slow
def test_an_xid_is_told_once_and_a_state_when_it_changes(exporter: Exporter) -> None:
    async def story(watched: Watched) -> None:
        await watched.looked()
        assert watched.found == []
        exporter.body = page(xid=31, ecc=2)
        await watched.looked(4)
        exporter.body = page(xid=79, ecc=2, remap_failed=1)
        await watched.looked(4)

    watched = play(exporter, story)
    assert watched.codes() == [31, 79] and watched.blind() == []
    assert watched.changed() == [("0000:1a:00", "ecc_uncorrected", 2), ("0000:1a:00", "remap_failed", 1)]
    assert all(f.source == "dcgm" for f in watched.found)


def test_what_stands_there_at_the_first_look_is_no_event_but_a_failed_remap_is_a_fact(exporter: Exporter) -> None:
    exporter.body = page(xid=79, ecc=7, remap_failed=1)
    watched = play(exporter, lambda w: w.looked(3))
    assert watched.codes() == [] and watched.changed() == [("0000:1a:00", "remap_failed", 1)]


@pytest.mark.slow
def test_an_exporter_that_restarts_is_one_gap_and_no_event(exporter: Exporter) -> None:
    async def story(watched: Watched) -> None:
        exporter.body = page(xid=31)
        await watched.looked()
        exporter.stop()
        await watched.until(watched.blind)
        exporter.body = page(xid=0)
        exporter.start()
        await watched.looked(3)
        exporter.body = page(xid=31)  # the gauge shows again what it held before the restart
        await watched.looked(3)

    watched = play(exporter, story)
    assert watched.codes() == []
    assert len(watched.blind()) == 1 and "ConnectionRefusedError" in watched.blind()[0]


@pytest.mark.slow
def test_a_series_and_a_gpu_that_are_gone_are_blindness_said_once(exporter: Exporter) -> None:
    async def story(watched: Watched) -> None:
        await watched.looked()
        exporter.body = page(without="DCGM_FI_DEV_ROW_REMAP_FAILURE")
        await watched.looked(4)
        exporter.body = page(gpus=1)
        await watched.looked(4)

    first, second = play(exporter, story).blind()
    assert "DCGM_FI_DEV_ROW_REMAP_FAILURE" in first and "0000:1b:00" in second


@pytest.mark.slow
def test_garbage_in_the_place_of_a_page_is_blindness_until_it_is_back(exporter: Exporter) -> None:
    async def story(watched: Watched) -> None:
        await watched.looked()
        exporter.body = b"<html>\xff\xfe please log in {} 1</html>\n" * 50
        await watched.until(watched.blind)
        await watched.looked(3)
        exporter.body = page(xid=48)
        await watched.until(watched.codes)

    watched = play(exporter, story)
    assert len(watched.blind()) == 1 and watched.codes() == [48]


@pytest.mark.slow
def test_a_server_that_never_answers_is_said_once_and_keeps_nothing_waiting(exporter: Exporter) -> None:
    hold = threading.Event()
    exporter.serve = lambda connection: hold.wait(20) and None

    async def story(watched: Watched) -> None:
        await watched.until(watched.blind)
        turns = 0
        until_s = time.monotonic() + 0.5
        while time.monotonic() < until_s:
            await asyncio.sleep(0.01)
            turns += 1
        assert turns > 10  # the loop is free
        exporter.serve = exporter.send_body
        await watched.looked(2)
        exporter.body = page(xid=94)
        await watched.until(watched.codes)

    watched = play(exporter, story)
    hold.set()
    assert len(watched.blind()) == 1 and "no answer within 1 s" in watched.blind()[0]
