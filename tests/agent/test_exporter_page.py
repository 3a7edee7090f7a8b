"""A real agent of a run that names an exporter: its page's facts go up the link as the library's would."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from outlast.reliability.model import GpuChanged, SourceBlind

pytestmark = pytest.mark.slow
PAGE = b'DCGM_FI_DEV_ROW_REMAP_FAILURE{gpu="0",UUID="GPU-0",pci_bus_id="00000000:1A:00.0",Hostname="x"} 1\n'


PATHS: list[str] = []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        PATHS.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/%n/metrics"
        server.shutdown()


def test_the_page_of_the_nodes_own_exporter_is_read(make_agent: Callable[..., Any], url: str) -> None:
    agent = make_agent(node="n4", exporter=url)
    (told,) = agent.wait(lambda: agent.signals(GpuChanged))
    assert (told.node, told.source, told.gpu, told.field, told.now) == ("n4", "dcgm", "0000:1a:00", "remap_failed", 1)
    assert PATHS[0] == "/n4/metrics"


def test_an_exporter_that_is_not_there_is_blindness(make_agent: Callable[..., Any]) -> None:
    agent = make_agent(exporter="http://127.0.0.1:9/metrics")
    (blind,) = agent.wait(lambda: agent.signals(SourceBlind))
    assert blind.source == "dcgm" and not blind.hung
