"""The command line as a person meets it: what is said, exit codes, and what is imported for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
import pytest

from outlast.reliability.actions import Hold
from outlast.reliability.attempt import Event, State
from outlast.reliability.cli.root import COMMANDS, cli, start
from outlast.reliability.cli.show import print_table, visible
from outlast.reliability.clock import SteadyClock
from outlast.reliability.eventlog import EventLog, boot_id
from outlast.reliability.events import AttemptMoved, AttemptPlanned, Body, EpochTaken, Intent, RunEnded, RunStarted
from outlast.reliability.freeze import find_run, freeze
from outlast.reliability.model import Layout, Node, OperatorAsked, Plan
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import RunFile, Task

Say = Callable[..., tuple[int, str, str]]
OUTLAST = [sys.executable, "-c", "from outlast.reliability.app import main; main()"]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Runs the command line here: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUTLAST_RUN_ROOT", raising=False)
    Path("train.py").write_text("")
    Path("run.yaml").write_text("name: a\ntask: {script: train.py}\nparams: {lr: 1.0}\n")

    def saying(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = start(words)
        done = capsys.readouterr()
        return code, done.out, done.err

    return saying


def a_run_dir(*bodies: Body) -> RunDir:
    """A run below runs/ whose log holds these."""
    run_dir = freeze(RunFile(name="a", task=Task(script="train.py")), Path("runs"))
    if bodies:
        log, _ = EventLog.open(run_dir.events, 1, clock=SteadyClock(), boot=boot_id(), guard=None)
        log.append_many(bodies)
        log.close()
    return run_dir


BEGUN = (
    EpochTaken(epoch=1, node="", pid=1, why="test"),
    RunStarted(run="a-0001", run_file_sha256="", train_steps=60, layout=Layout(), nodes=1, spares=0),
)
HELD = (*BEGUN, Intent(act=1, action=Hold(why="three times the same exception")))
ENDED = (*BEGUN, RunEnded(outcome="finished", why="train_step 60"))


# ---------------------------------------------------------------- help


def test_help_names_every_command_and_exit_code(say: Say) -> None:
    code, out, _ = say("--help")
    assert code == 0
    assert all(name in out for name, entry in COMMANDS.items() if not entry.hidden)
    for text in ("0  done or healthy", "2  wrong use", "3  held", "4  the environment is unfit", "75  try again"):
        assert text in out
    assert "agent" not in out


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "check"])
def test_every_command_has_a_page_with_its_one_line(say: Say, name: str) -> None:
    code, out, err = say(name, "--help")
    assert code == 0 and "Usage: outlast" in out and not err
    command = cli.get_command(click.Context(cli), name)  # type: ignore[attr-defined]
    assert command.help and len(command.help) > 20


@pytest.mark.slow
def test_no_module_of_the_rooms_is_imported_for_help() -> None:
    code = (
        "import sys; from outlast.reliability.cli.root import start; start(['--help']); "
        "print([m for m in sys.modules if m.startswith(('outlast.', 'msgspec', 'yaml', 'rich', 'asyncio', 'torch'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stdout.splitlines()[-1]
    assert loaded == "['outlast.reliability', 'outlast.reliability.cli', 'outlast.reliability.cli.root']"


def test_check_is_handed_over_before_anything_else_is_imported() -> None:
    code = (
        "import sys; sys.argv = ['outlast', 'check', '--help']\n"
        "from outlast.reliability.app import main\n"
        "try: main()\n"
        "except SystemExit as end: print('code', end.code)\n"
        "heavy = ('click', 'msgspec', 'yaml', 'rich', 'psutil', 'asyncio')\n"
        "print([m for m in sys.modules if m.split('.')[0] in heavy])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "code 0" in done.stdout and done.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_check_starts_nearly_as_fast_as_python_itself() -> None:
    """A ratio, so that it means the same on a slow or busy machine; all take turns, and the best of each counts."""
    bare = [sys.executable, "-c", "pass"]
    start = [*OUTLAST, "check", "--help"]
    whole = [sys.executable, "-c", "import click, msgspec, yaml, rich.console"]
    took: list[tuple[float, ...]] = []
    for _ in range(20):
        turn = []
        for argv in (bare, start, whole):
            begun_s = time.perf_counter()
            subprocess.run(argv, capture_output=True, timeout=60, check=True)
            turn.append(time.perf_counter() - begun_s)
        took.append(tuple(turn))
    bare_s, start_s, whole_s = map(min, zip(*took, strict=True))
    assert start_s < bare_s * 6, f"bare python {bare_s * 1000:.0f} ms, outlast check {start_s * 1000:.0f} ms"
    assert start_s < whole_s, f"with every package {whole_s * 1000:.0f} ms, outlast check {start_s * 1000:.0f} ms"


def test_an_unknown_command_is_told_what_was_meant(say: Say) -> None:
    code, _, err = say("stauts")
    assert code == 2 and "no such command: 'stauts'; did you mean status?" in err


def test_version(say: Say) -> None:
    code, out, _ = say("--version")
    assert code == 0 and out.startswith("outlast ")


# ---------------------------------------------------------------- config


def test_config_check_shows_values_with_their_sources(say: Say) -> None:
    code, out, _ = say("config", "check", "run.yaml", "--set", "lr=2e-4", "--set", "cluster.nodes=2")
    assert code == 0
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in out.splitlines() if line.startswith("$")}
    assert rows["$.params.lr"] == ["0.0002", "--set lr=2e-4"]
    assert rows["$.cluster.nodes"] == ["2", "--set cluster.nodes=2"]
    assert rows["$.task.script"] == ["train.py", "run.yaml"]
    assert rows["$.checkpoint.every_s"] == ["30min", "auto (default)"]
    assert "$.limits.lease_s" not in rows and "2 ranks on 2 nodes" in out
    assert "$.limits.lease_s" in say("config", "check", "run.yaml", "--all")[1]


def test_config_check_as_data_is_the_run_file(say: Say) -> None:
    code, out, _ = say("config", "check", "run.yaml", "--json")
    got = json.loads(out)
    run = msgspec.convert(got["run"], RunFile)
    assert code == 0 and run.params == {"lr": 1.0}
    assert {"path": "$.params.lr", "value": 1.0, "source": "run.yaml"} in got["used"]


def test_findings_go_to_stderr_with_exit_code_2(say: Say) -> None:
    code, out, err = say("config", "check", "run.yaml", "--set", "cluster.nods=2", "--set", "limits.lease=x")
    assert code == 2 and out == ""
    assert len(err.splitlines()) == 2 and "did you mean nodes?" in err


def test_findings_as_data(say: Say) -> None:
    code, out, err = say("config", "check", "run.yaml", "--set", "cluster.nods=2", "--json")
    (finding,) = json.loads(out)["findings"]
    assert code == 2 and err == ""
    assert finding["path"] == "$.cluster.nods" and "did you mean nodes?" in finding["text"]


def test_schema_is_json(say: Say) -> None:
    code, out, _ = say("config", "schema")
    assert code == 0 and json.loads(out)["title"] == "RUN.yaml of outlast"


# ---------------------------------------------------------------- stop and continue


def read_requests(run_dir: RunDir) -> list[OperatorAsked]:
    paths = sorted(run_dir.requests.iterdir())
    assert all(path.suffix == ".json" for path in paths)
    return [msgspec.json.decode(path.read_bytes(), type=OperatorAsked) for path in paths]


def test_stop_leaves_one_request_and_says_what_will_happen(say: Say) -> None:
    run_dir = a_run_dir(*BEGUN)
    code, out, _ = say("stop", "a-0001", "--no-wait", "--note", "enough")
    assert code == 0 and "it will not be queued again" in out
    (asked,) = read_requests(run_dir)
    assert (asked.what, asked.note) == ("stop", "enough") and asked.who
    assert asked.at_s == pytest.approx(time.time(), abs=60)


def test_stop_of_a_run_that_has_ended_asks_nothing(say: Say) -> None:
    run_dir = a_run_dir(*ENDED)
    code, out, _ = say("stop", "a-0001")
    assert code == 0 and "has already ended: finished (train_step 60)" in out
    assert read_requests(run_dir) == []


@pytest.mark.slow
def test_stop_that_is_not_heard_in_time_says_so_and_stands(say: Say) -> None:
    run_dir = a_run_dir(*BEGUN)
    code, out, err = say("stop", "a-0001", "--timeout", "0.1")
    assert code == 75 and "waiting for the supervisor to read it" in out and "the request stands" in err
    assert len(read_requests(run_dir)) == 1


def test_stop_waits_for_the_end(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = a_run_dir(*BEGUN)
    from outlast.reliability.cli import ask

    def end_it(_seconds: float) -> None:  # stands for the supervisor: it works while we wait
        log, _ = EventLog.open(run_dir.events, 1, clock=SteadyClock(), boot=boot_id(), guard=None)
        log.append(RunEnded(outcome="stopped", why="asked"))
        log.close()

    monkeypatch.setattr(ask.time, "sleep", end_it)
    code, out, _ = say("stop", "a-0001")
    assert code == 0 and "has ended: stopped (asked)" in out


def test_continue_is_for_held_runs_alone(say: Say) -> None:
    run_dir = a_run_dir(*BEGUN)
    code, _, err = say("continue", "a-0001")
    assert code == 1 and "is not held" in err and read_requests(run_dir) == []
    held = a_run_dir(*HELD)
    code, out, _ = say("continue", held.name, "--note", "data mended")
    assert code == 0 and "was held: three times the same exception" in out
    assert [asked.what for asked in read_requests(held)] == ["continue"]


def test_no_such_run_is_told_with_what_is_near(say: Say) -> None:
    a_run_dir()
    for words in (("stop", "a-0002"), ("continue", "a"), ("status", "a-001")):
        code, _, err = say(*words)
        assert code == 2 and "no such run" in err and "did you mean a-0001?" in err


# ---------------------------------------------------------------- status


def test_status_has_a_row_a_run_and_the_documented_codes(say: Say) -> None:
    assert "no runs below runs" in say("status")[1]
    a_run_dir()
    a_run_dir(*HELD)
    a_run_dir(*BEGUN, RunEnded(outcome="failed", why="gave up"))
    code, out, _ = say("status")
    assert code == 0 and [line.split()[0] for line in out.splitlines()[1:4]] == ["a-0001", "a-0002", "a-0003"]
    assert say("status", "a-0001")[0] == 0
    assert say("status", "a-0003")[0] == 1
    (new, held, failed) = json.loads(say("status", "--json")[1])
    assert (new["state"], failed["state"]) == ("new", "failed")
    assert json.loads(say("status", "a-0003", "--json")[1]) == failed and held["run"] == "a-0002"


def test_a_held_run_has_code_3_and_its_way_on(say: Say) -> None:
    plan = Plan(attempt=1, layout=Layout(), nodes=(Node("n1"),), ranks=())
    moves = (
        AttemptMoved(attempt=1, event=Event.STOP_ASKED, state=State.STOPPING),
        AttemptMoved(attempt=1, event=Event.NODES_CLEAR, state=State.ENDED),
    )
    a_run_dir(*BEGUN, AttemptPlanned(plan=plan), *moves, Intent(act=1, action=Hold(why="why")))
    code, out, _ = say("status", "a-0001")
    assert code == 3 and "outlast continue a-0001" in out


# ---------------------------------------------------------------- run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "expected RUN.yaml for a new run, or --run-dir DIR"),
        (("run.yaml", "--run-dir", "x"), "expected RUN.yaml for a new run, or --run-dir DIR"),
        (("--run-dir", "x", "--set", "a=1"), "--set and --params are for new runs"),
        (("--run-dir", "x"), "x/run.yaml: cannot be read: No such file or directory"),
        (("run.yaml",), "asks for Slurm and this is no allocation of yours"),
    ],
)
def test_run_refuses_wrong_use(say: Say, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    code, _, err = say("run", *words)
    assert code == 2 and message in err
    assert not Path("runs").exists()


# ---------------------------------------------------------------- what is printed


def test_log_text_does_not_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert visible("a\x1b[31mb\x07\x9b") == r"a\x1b[31mb\x07\x9b"
    print_table(("A", "B"), [("x\x1b]0;y\x07", "1")], right=(1,))
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_reader_that_left_is_no_error(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*OUTLAST, "config", "schema"], stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_names_of_runs_are_completed(say: Say) -> None:
    a_run_dir()
    from outlast.reliability.cli.common import RunName

    context = click.Context(cli)
    found = RunName().shell_complete(context, click.Argument(["run"]), "a-")
    assert [item.value for item in found] == ["a-0001"] == [find_run("a-0001").name]
