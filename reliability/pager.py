"""Telling a person: a line on stderr, a line in `pages.jsonl` of the run directory, and a POST to a webhook.

It never raises and never blocks for long: a page that cannot be sent must not become the run's next fault. The
webhook's address is a secret: it is read from a file that only its owner can read, for each page anew (so it can be
mended while the run goes on), and stands in no log, no error and no argument list.
"""

from __future__ import annotations

import os
import stat
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from outlast.reliability.model import Noun
from outlast.reliability.wording import one_line, utc, visible

_TRIES: Final = 3
_TIMEOUT_S: Final = 5.0
_MAX_TEXT: Final = 4000


class Page(Noun, frozen=True, kw_only=True, omit_defaults=False):
    """One line of pages.jsonl, and the body of the POST. `text` is what chat services show."""

    run: str
    title: str
    text: str
    at_s: float
    sent: str = ""
    """'' in the POST; in the file: what became of it."""


class WebhookPager:
    """ports.Pager. Without a webhook file it writes stderr and pages.jsonl only."""

    def __init__(
        self,
        run_dir: Path,
        webhook_file: str = "",
        *,
        timeout_s: float = _TIMEOUT_S,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.run_dir = run_dir
        self.webhook_file = Path(webhook_file).expanduser() if webhook_file else None
        self.timeout_s, self._pause = timeout_s, pause
        self.unsent = 0
        """Pages that the webhook did not take."""

    def page(self, title: str, text: str) -> None:
        """Tell a person. Returns within about `_TRIES` x (timeout + 1 s)."""
        page = Page(run=self.run_dir.name, title=one_line(title), text=visible(text, limit=_MAX_TEXT), at_s=time.time())
        _say(f"outlast PAGE {utc(page.at_s)} {page.title}: {one_line(page.text, limit=1000)}")
        sent = "no webhook is set"
        if self.webhook_file is not None:
            problem = self._post(self.webhook_file, page)
            sent = problem or "sent"
            if problem:
                self.unsent += 1
                _say(f"outlast: the page was not sent ({problem}); {self.unsent} so far")
        self._keep(msgspec.structs.replace(page, sent=sent))

    def _keep(self, page: Page) -> None:
        line = msgspec.json.encode(page) + b"\n"
        try:
            fd = os.open(self.run_dir / "pages.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, line)
            finally:
                os.close(fd)
        except OSError as error:
            _say(f"outlast: {self.run_dir}/pages.jsonl: {error.strerror}; the page stands above only")

    def _post(self, file: Path, page: Page) -> str:
        """'' when the webhook took it, else why not; never with the address in it."""
        url, problem = _read_url(file)
        if problem:
            return problem
        shown = msgspec.structs.replace(page, text=f"{page.title}\n{page.text}")
        for attempt in range(1, _TRIES + 1):
            problem, again = _send(url, msgspec.json.encode(shown), self.timeout_s)
            if not problem or not again or attempt == _TRIES:
                return problem
            self._pause(0.5 * attempt)
        return problem


def _say(line: str) -> None:
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # stderr is gone; nothing is left to tell it to


def _read_url(file: Path) -> tuple[str, str]:
    """(address, problem); one of them is ''."""
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        if mode & 0o077:
            return "", f"{file}: mode {mode:04o}, expected 0600 (it holds a secret): chmod 600 it"
        url = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        return "", f"{file}: {error.strerror if isinstance(error, OSError) else 'not text'}"
    if not url.startswith(("https://", "http://")) or any(c.isspace() for c in url):
        return "", f"{file}: expected one https:// address"
    return url, ""


class _Stay(urllib.request.HTTPRedirectHandler):
    """No redirects: the page goes where the file says, or nowhere."""

    def redirect_request(self, *_args: object, **_more: object) -> None:
        return None


_OPENER: Final = urllib.request.build_opener(_Stay)


def _send(url: str, body: bytes, timeout_s: float) -> tuple[str, bool]:
    """(problem, whether trying again can help)."""
    try:
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"}, method="POST")
        with _OPENER.open(request, timeout=timeout_s):
            return "", False
    except urllib.error.HTTPError as error:
        error.close()
        return f"the webhook answered {error.code}", error.code == 429 or error.code >= 500
    except urllib.error.URLError as error:
        reason = error.reason
        said = (reason.strerror or type(reason).__name__) if isinstance(reason, OSError) else "no answer"
        return f"the webhook cannot be reached: {said}", True
    except Exception as error:  # noqa: BLE001 - a page never raises; its text may hold the address, its type does not
        return f"the webhook cannot be reached: {type(error).__name__}", isinstance(error, OSError)
