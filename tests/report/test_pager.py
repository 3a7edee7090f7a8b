"""The pager against a real HTTP server on loopback: what is sent, what is tried again, and what is never shown."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from outlast.reliability.pager import WebhookPager


class Hook(HTTPServer):
    """Answers with the codes of `answers` in turn, then 200; keeps the bodies."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Taker)
        self.answers: list[int] = []
        self.bodies: list[dict[str, object]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/secret-token"


class Taker(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.answers.pop(0) if self.server.answers else 200)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[Hook]:
    server = Hook()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join(5)
    server.server_close()


def make_pager(tmp_path: Path, url: str, *, mode: int = 0o600) -> tuple[WebhookPager, list[float]]:
    secret = tmp_path / "webhook"
    secret.write_text(url + "\n")
    secret.chmod(mode)
    paused: list[float] = []
    return WebhookPager(tmp_path, str(secret), pause=paused.append, timeout_s=2), paused


def kept(tmp_path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (tmp_path / "pages.jsonl").read_text().splitlines()]


def test_a_page_reaches_the_webhook_stderr_and_the_run(
    hook: Hook, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pager, _ = make_pager(tmp_path, hook.url)
    pager.page("held: a person\x1b[2J is needed", "the same exception\nthree times")
    assert hook.bodies[0]["text"] == "held: a person\\x1b[2J is needed\nthe same exception\nthree times"
    assert kept(tmp_path)[0]["sent"] == "sent"
    assert "PAGE" in (told := capsys.readouterr().err) and "\x1b" not in told
    assert (tmp_path / "pages.jsonl").stat().st_mode & 0o777 == 0o600
    assert pager.unsent == 0


def test_a_server_in_trouble_is_tried_again_and_a_refusal_is_not(hook: Hook, tmp_path: Path) -> None:
    pager, paused = make_pager(tmp_path, hook.url)
    hook.answers = [503, 429]
    pager.page("t", "x")
    assert (len(hook.bodies), len(paused), pager.unsent) == (3, 2, 0)
    hook.answers = [404]
    pager.page("t", "x")
    assert (len(hook.bodies), pager.unsent) == (4, 1)
    hook.answers = [500] * 9
    pager.page("t", "x")
    assert (len(hook.bodies), pager.unsent) == (7, 2)


def test_a_redirect_is_not_followed(hook: Hook, tmp_path: Path) -> None:
    pager, _ = make_pager(tmp_path, hook.url)
    hook.answers = [302]
    pager.page("t", "x")
    assert (len(hook.bodies), pager.unsent) == (1, 1)


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:9/secret-token", "file:///etc/secret-token", "http://[secret-token", "", "\x00secret-token"],
)
def test_the_address_is_never_shown(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pager, _ = make_pager(tmp_path, url)
    pager.page("t", "x")
    assert pager.unsent == 1
    assert "secret-token" not in capsys.readouterr().err + (tmp_path / "pages.jsonl").read_text()


def test_a_secret_that_others_can_read_is_refused(
    hook: Hook, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pager, _ = make_pager(tmp_path, hook.url, mode=0o644)
    pager.page("t", "x")
    assert not hook.bodies
    assert "mode 0644, expected 0600" in capsys.readouterr().err


def test_it_never_raises_whatever_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pager = WebhookPager(tmp_path / "gone", str(tmp_path / "no-file"))
    pager.page("t", "x\ud800")
    told = capsys.readouterr().err
    assert "No such file" in told and "stands above only" in told
    WebhookPager(tmp_path).page("t", "no webhook")
    assert kept(tmp_path)[0]["sent"] == "no webhook is set"
