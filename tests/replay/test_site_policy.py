"""A site's policy from file to judge: found, frozen with the run, the same for successors, noted when it moves."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.reliability import site_policy
from outlast.reliability.cli.root import start
from outlast.reliability.config import load_frozen
from outlast.reliability.eventlog import read_events
from outlast.reliability.events import Judged, Noted, Seen
from outlast.reliability.findings import ConfigError
from outlast.reliability.freeze import freeze
from outlast.reliability.model import RankPlaced
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import Cluster, RunFile, Task
from outlast.reliability.site_policy import RunPolicy, site_file

QUIET = "xids:\n  79: {action: watch, alone: false, convicts: false, drains: false}\n"
OTHER = "xids:\n  94: {drains: true, action: drain_reset}\n"


@pytest.fixture(autouse=True)
def no_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine's own policy must not reach the tests."""
    monkeypatch.setattr(site_policy, "SITE_FILE", tmp_path / "etc" / "policy.yaml")
    monkeypatch.delenv(site_policy.ENV, raising=False)
    return tmp_path / "etc" / "policy.yaml"


def asked(policy: str = "") -> RunFile:
    return RunFile(name="t", task=Task(script="x.py"), cluster=Cluster(kind="local", policy=policy))


def rows(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_the_run_files_word_comes_first_then_the_environments_then_the_sites(
    tmp_path: Path, no_site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert site_file(asked()) is None
    rows(no_site, QUIET)
    assert site_file(asked()) == no_site
    monkeypatch.setenv("OUTLAST_POLICY", str(tmp_path / "env.yaml"))
    assert site_file(asked()) == tmp_path / "env.yaml"
    assert site_file(asked(str(tmp_path / "run.yaml"))) == tmp_path / "run.yaml"


def test_a_run_is_frozen_with_the_sites_rows_and_judged_by_them_whatever_becomes_of_the_file(tmp_path: Path) -> None:
    site = rows(tmp_path / "site.yaml", QUIET)
    run_dir = freeze(asked(str(site)), tmp_path / "runs")
    assert run_dir.policy.read_text() == QUIET and stat.S_IMODE(run_dir.policy.stat().st_mode) == 0o600
    assert load_frozen(run_dir).cluster.policy == str(site)
    for change in (lambda: site.write_text(OTHER), site.unlink):
        change()
        catalogue = RunPolicy(run_dir, load_frozen(run_dir)).catalogue  # as a successor does
        assert not catalogue.xid(79, "x").convicts and not catalogue.xid(94, "x").drains


def test_a_run_without_a_policy_is_judged_by_the_catalogue_as_it_is(tmp_path: Path) -> None:
    run_dir = freeze(asked(), tmp_path / "runs")
    policy = RunPolicy(run_dir, load_frozen(run_dir))
    assert not run_dir.policy.exists() and policy.catalogue.xid(79, "x").drains and policy.notes() == ()


def test_what_it_is_judged_by_and_a_change_of_it_are_noted(tmp_path: Path, no_site: Path) -> None:
    site = rows(tmp_path / "site.yaml", QUIET)
    run_dir = freeze(asked(str(site)), tmp_path / "runs")
    policy = RunPolicy(run_dir, load_frozen(run_dir))
    (said,) = policy.notes()
    assert f"the site's rows of {site}" in said and "xids.79 action: drain_reboot -> watch" in said
    site.write_text(OTHER)
    assert policy.notes()[0] == said and "is not as it was" in policy.notes()[1]
    site.unlink()
    assert "cannot be read here" in policy.notes()[1]


def test_a_site_that_gets_a_policy_later_does_not_change_a_run(tmp_path: Path, no_site: Path) -> None:
    run_dir = freeze(asked(), tmp_path / "runs")
    policy = RunPolicy(run_dir, load_frozen(run_dir))
    rows(no_site, QUIET)
    assert policy.catalogue.xid(79, "x").drains
    (said,) = policy.notes()
    assert "was not there when the run was frozen" in said


def test_the_frozen_rows_may_go_once_they_are_read(tmp_path: Path) -> None:
    site = rows(tmp_path / "site.yaml", "kernel:\n  soft_lockup: {alone: true}\n")
    run_dir = freeze(asked(str(site)), tmp_path / "runs")
    catalogue = RunPolicy(run_dir, load_frozen(run_dir)).catalogue
    run_dir.policy.unlink()
    row = catalogue.kernel("soft_lockup")
    assert row is not None and row.alone


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("xids:\n  79: {action: drain_rebot}\n", "did you mean 'drain_reboot'?"),
        ("xids: [\n", "not YAML"),
        ("sites: {}\n", "no such table"),
        (None, "No such file"),
    ],
)
def test_a_policy_that_cannot_be_used_refuses_the_run_before_it_exists(
    tmp_path: Path, text: str | None, said: str
) -> None:
    site = tmp_path / "site.yaml"
    if text is not None:
        site.write_text(text)
    with pytest.raises(ConfigError) as error:
        freeze(asked(str(site)), tmp_path / "runs")
    assert str(site) in str(error.value) and said in str(error.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("word", ["--dry-run", ""])
def test_submit_says_what_is_wrong_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTLAST_POLICY", str(rows(tmp_path / "site.yaml", "xids:\n  79: {drain: false}\n")))
    (tmp_path / "train.py").write_text("")
    (tmp_path / "run.yaml").write_text("name: t\ntask: {script: train.py, kind: plain}\ntrain_steps: 10\n")
    assert start(["submit", "run.yaml", *([word] if word else [])]) == 2
    assert "site.yaml: $.xids.79.drain: no such setting; did you mean 'drains'?" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


# ---------------------------------------------------------------- live


@pytest.mark.slow
def test_a_live_supervisor_and_its_successor_judge_by_it(tmp_path: Path) -> None:
    """XID 79 is only watched at this site: the line is written to the log, and nobody is convicted for it."""
    log = tmp_path / "kernel"
    log.touch()
    site = rows(tmp_path / "site.yaml", QUIET)
    (tmp_path / "run.yaml").write_text(
        "name: toy\ntask: {command: [sleep, '600']}\n"
        f"cluster: {{kind: local, nodes: 1, ranks_per_node: 1, kernel_log: {log}, policy: {site}}}\n"
        "limits: {term_grace: 1s, settle: 0.2s}\n"
    )
    run_dir = RunDir(root=tmp_path / "runs" / "toy-0001")
    words = [sys.executable, "-m", "outlast.reliability.app", "run"]
    first = subprocess.Popen([*words, "run.yaml"], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    second: subprocess.Popen[bytes] | None = None
    try:
        until(lambda: any(isinstance(b, Noted) and "judged by the site's rows" in b.text for b in bodies(run_dir)))
        until(lambda: any(isinstance(b, Seen) and isinstance(b.signal, RankPlaced) for b in bodies(run_dir)))
        fell_off(log, run_dir, 1)
        first.send_signal(signal.SIGKILL)
        first.wait(10)
        site.unlink()
        gone = subprocess.DEVNULL
        second = subprocess.Popen([*words, "--run-dir", str(run_dir.root)], cwd=tmp_path, stdout=gone, stderr=gone)
        until(lambda: any(isinstance(b, Noted) and "cannot be read here" in b.text for b in bodies(run_dir)))
    finally:
        for process in (first, second):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(30)
    assert not any(v.convicts or v.drains for v in verdicts(run_dir))


def fell_off(log: Path, run_dir: RunDir, times: int) -> None:
    line = b"[ 10.0] NVRM: Xid (PCI:0000:1a:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, line)
    os.close(descriptor)
    until(lambda: len([v for v in verdicts(run_dir) if v.rule == "gpu_bus_loss"]) >= times)


def bodies(run_dir: RunDir) -> list[Any]:
    return [e.body for e in read_events(run_dir.events).events] if run_dir.events.exists() else []


def verdicts(run_dir: RunDir) -> list[Any]:
    return [b.verdict for b in bodies(run_dir) if isinstance(b, Judged)]


def until(what: Callable[[], Any], limit_s: float = 60.0) -> Any:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if got := what():
            return got
        time.sleep(0.05)
    pytest.fail(f"not within {limit_s:.0f} s")
