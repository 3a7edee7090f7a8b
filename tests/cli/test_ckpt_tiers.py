"""`outlast ckpt upload | fetch`, and a supervised run that copies its checkpoints to a real S3 server."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.checkpoint.commit import commit, write_bytes
from outlast.checkpoint.manifest import Manifest
from outlast.checkpoint.names import name_step
from outlast.checkpoint.objects import FsspecObjects
from outlast.checkpoint.ops import RealOps
from outlast.checkpoint.remote import Remote
from outlast.checkpoint.store import Store
from outlast.reliability.cli.compose import make_store
from outlast.reliability.cli.root import start
from outlast.reliability.config import load_frozen
from outlast.reliability.copies import Copies
from outlast.reliability.freeze import freeze
from outlast.reliability.model import Layout
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import RunFile, Task, Tiers

SHARD = "__0_0.distcp"
BUCKET = "outlast-cli"


def make(root: Path, step: int) -> None:
    ops, directory = RealOps(), root / name_step(step)
    directory.mkdir(parents=True)
    files = {name: write_bytes(ops, directory / name, name.encode() * 99) for name in (SHARD, "common.pt")}
    commit(ops, directory, Manifest(schema=1, train_step=step, samples=8 * step, layout=Layout(), files=files))


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A frozen run with checkpoints 10 and 20; its object store is a directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUTLAST_RUN_ROOT", raising=False)
    tiers = Tiers(remote_url=f"file://{tmp_path}/objects", remote_keep_last=1)
    frozen = freeze(RunFile(name="lm", task=Task(script="t.py"), tiers=tiers), Path("runs"))
    for step in (10, 20):
        make(frozen.checkpoints, step)
    return RunDir(root=frozen.root.absolute())


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
        monkeypatch.setenv(name, value)
    boto3.resource("s3").Bucket(BUCKET).create()
    yield f"s3://{BUCKET}/ckpt"
    server.stop()


def say(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    capsys.readouterr()
    code = start(["ckpt", *words])
    done = capsys.readouterr()
    return code, done.out + done.err


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code, out = say(capsys, "ls", "--json", "lm-0001")
    assert code == 0
    return {row["name"]: row for row in json.loads(out)["checkpoints"]}


def test_up_and_back_by_the_name_of_the_run(
    run_dir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = say(capsys, "upload", "lm-0001/20")
    assert code == 0 and "all read back" in out
    assert (tmp_path / "objects" / "lm-0001" / "iter_0000020" / "COMMITTED").is_file()
    rows = listed(capsys)
    assert (rows["iter_0000010"]["tier"], rows["iter_0000020"]["tier"]) == ("shared", "remote")
    assert "remote" in say(capsys, "show", "lm-0001/20")[1]
    shutil.rmtree(run_dir.checkpoints / "iter_0000020")
    code, out = say(capsys, "fetch", "lm-0001", "--json")
    assert code == 0 and json.loads(out)["train_step"] == 20
    assert listed(capsys)["iter_0000020"]["state"] == "committed"
    code, out = say(capsys, "fetch", "lm-0001/10")
    assert code == 2 and "which has 20" in out
    # elsewhere, by URL
    url = f"file://{tmp_path}/objects/lm-0001"
    assert say(capsys, "fetch", "20", "--url", url)[0] == 2, "20 of which run?"
    assert say(capsys, "fetch", "20", "--url", url, "--to", "copy")[0] == 0
    assert Store(tmp_path / "copy").durable_steps() == (20,)


def test_what_goes_wrong_has_its_exit_code(run_dir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir.checkpoints / "iter_0000020" / SHARD).write_bytes(b"?" * 99 * len(SHARD))
    code, out = say(capsys, "upload", "lm-0001/20")
    assert code == 1 and "sent twice" in out
    (tmp_path / "objects").rename(tmp_path / "away")
    (tmp_path / "objects").write_text("no directory")
    assert say(capsys, "upload", "lm-0001/10")[0] == 75
    code, out = say(capsys, "upload", str(run_dir.checkpoints / "iter_0000010"))
    assert code == 2 and "--url" in out


@pytest.mark.slow
def test_each_durable_one_is_copied_by_a_process_of_its_own(run_dir: RunDir, tmp_path: Path) -> None:
    said: list[str] = []
    copies = Copies(run_dir, load_frozen(run_dir).tiers)
    copies.due(10, said.append)
    until(lambda: len(said) == 1)
    copies.due(20, said.append)
    copies.close(60.0)
    assert len(said) == 2 and "all read back" in said[0] and "removed 10 there" in said[1]
    assert Remote(FsspecObjects(f"file://{tmp_path}/objects/lm-0001")).steps() == (20,)


@pytest.mark.slow
def test_every_second_one_and_a_child_that_hangs_ends_with_its_limit(run_dir: RunDir) -> None:
    said: list[str] = []
    copies = Copies(run_dir, Tiers(remote_url="file:///nowhere", remote_every=2), upload_s=0.05)
    copies.due(10, said.append)
    until(lambda: len(said) == 1)
    assert "not done within" in said[0]
    copies.due(20, said.append)
    copies.close(20.0)
    assert len(said) == 1, "the second is not one of every second"


def until(condition: Any, limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "not in time"
        time.sleep(0.02)


RUN = """
name: toy
task: {{module: outlast.launchers.trainer}}
cluster: {{kind: local, nodes: 1, ranks_per_node: 2, kernel_log: ''}}
layout: {{global_batch: 8}}
train_steps: 20
checkpoint: {{every: 10 steps, keep_last: 2}}
tiers: {{remote_url: '{url}', remote_keep_last: 5}}
"""


@pytest.mark.slow
@pytest.mark.megatron
def test_a_runs_checkpoints_come_back_when_the_shared_ones_are_lost(bucket: str, tmp_path: Path) -> None:
    """A real run on the local cluster, a real S3 protocol; then the directory of checkpoints is gone."""
    (tmp_path / "run.yaml").write_text(RUN.format(url=bucket))
    outlast = [sys.executable, "-m", "outlast.reliability.app"]
    process = subprocess.Popen(
        [*outlast, "run", "run.yaml"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "OUTLAST_RUN_ROOT"},
    )
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    assert process.returncode == 0, output
    run_dir = RunDir(root=tmp_path / "runs" / "toy-0001")
    remote = Remote(FsspecObjects(f"{bucket}/toy-0001"))
    assert remote.steps()[-1] == 20
    shutil.rmtree(run_dir.checkpoints)
    choice = make_store(run_dir, load_frozen(run_dir)).choose(quarantined=())
    assert choice.restore is not None and choice.restore.train_step == 20
