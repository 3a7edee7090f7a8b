"""Ranks started and ended by a real agent: exits, exceptions, signals, escapes, floods, hangs."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.launchers import reap
from outlast.reliability.model import RankPlaced, XidSeen
from outlast.reliability.runfile import Task
from outlast.reliability.wire import Beat

pytestmark = pytest.mark.slow
Script = Callable[[str], tuple[str, ...]]
AgentProcess = Any  # conftest's class
MakeAgent = Callable[..., Any]
SLEEP = "import time\nprint('ready', flush=True)\ntime.sleep(300)\n"


def test_exit_codes_are_the_scripts_own(agent: AgentProcess, script: Script) -> None:
    codes = ("pass", "import sys; sys.exit(17)", "raise SystemExit('no data')", "import os; os._exit(3)")
    assert agent.start(*(script(text) for text in codes)).ok
    assert [agent.exited(i).exit_code for i in range(4)] == [0, 17, 1, 3]
    assert "no data" in agent.exited(2).last_words
    assert not any(agent.exited(i).asked for i in range(4))


def test_a_script_runs_as_if_it_had_been_typed(agent: AgentProcess, script: Script, tmp_path: Path) -> None:
    argv = script(
        "import os, sys, signal, threading\n"
        "assert __name__ == '__main__' and sys.modules['__main__'].__dict__ is globals()\n"
        "assert sys.argv[1:] == ['--lr', '3'] and sys.path[0] == os.path.dirname(os.path.abspath(__file__))\n"
        "assert sys.stdin.read() == '' and os.getpgrp() == os.getpid() == os.getsid(0)\n"
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and threading.active_count() == 1\n"
        "assert os.environ['RANK'] == '0' and os.environ['OUTLAST_NODE'] == 'a'\n"
        "open_fds = [int(f) for f in os.listdir('/proc/self/fd')]\n"
        "there = [f'/proc/self/fd/{f}' for f in open_fds if f > 2]\n"
        "print('fds', [os.readlink(f) for f in there if os.path.lexists(f)])\n"
        "import atexit; atexit.register(print, 'last')\n"
        f"assert os.getcwd() == {str(tmp_path)!r}\n"
    )
    assert agent.start((*argv, "--lr", "3")).ok
    exited = agent.exited()
    assert exited.exit_code == 0, exited.last_words
    assert exited.last_words.endswith("last")
    assert "socket:" not in exited.last_words and "pipe:" not in exited.last_words


def test_an_exception_shows_the_programs_frames_alone(agent: AgentProcess, script: Script) -> None:
    agent.start(script("def f():\n    raise KeyError('doc_881')\nf()\n"))
    exited = agent.exited()
    assert (exited.exit_code, exited.exception) == (1, "KeyError: 'doc_881'")
    assert "runpy" not in exited.last_words and "launchers/rank.py" not in exited.last_words


def test_a_killed_rank_is_reported_by_its_posix_signal(agent: AgentProcess, script: Script) -> None:
    agent.start(script(SLEEP), script(SLEEP))
    placed = agent.wait(lambda: (p := agent.signals(RankPlaced)) and len(p) == 2 and p)
    os.kill(placed[0].pid, signal.SIGKILL)
    exited = agent.exited(placed[0].rank)
    assert (exited.exit_code, exited.posix_signal, exited.asked) == (None, 9, False)
    beat = agent.beat(lambda b: b.ranks_alive == 1)
    assert beat.state == "running" and beat.ranks_placed == 2


def test_placement_is_read_inside_the_rank(
    make_agent: MakeAgent, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    agent = make_agent()
    agent.start(script("import os; print(os.getpid())"))
    agent.exited()
    (placed,) = agent.signals(RankPlaced)
    assert placed.node == "n7" and placed.pid == int(agent.exited().last_words)


def test_starting_twice_is_done_once_and_older_attempts_are_refused(agent: AgentProcess, script: Script) -> None:
    argv = script(SLEEP)
    assert agent.start(argv, attempt=2, epoch=5).ok
    assert agent.start(argv, attempt=2, epoch=5).ok
    assert agent.beat(lambda b: b.attempt == 2).ranks_alive == 1
    assert "over" in agent.start(argv, attempt=1, epoch=5).why
    assert "epoch 4 is over" in agent.start(argv, attempt=3, epoch=4).why
    assert "stop it first" in agent.start(argv, attempt=3, epoch=5).why
    assert "over" in agent.stop(attempt=1).why
    assert agent.stop(attempt=2).ok
    assert agent.beat(lambda b: b.state == "clear").ranks_alive == 0
    assert agent.start(argv, attempt=3, epoch=6).ok


def test_an_end_that_was_asked_for_says_so(agent: AgentProcess, script: Script) -> None:
    agent.start(script(SLEEP))
    agent.wait(lambda: "ready" in agent.output())
    assert agent.stop().ok
    assert (agent.exited().asked, agent.exited().posix_signal) == (True, 15)


def test_a_rank_that_ignores_term_is_killed(agent: AgentProcess, script: Script) -> None:
    agent.start(script("import signal\nsignal.signal(15, signal.SIG_IGN)\n" + SLEEP))
    agent.wait(lambda: "ready" in agent.output())
    assert agent.stop(term_s=0.3).ok
    assert agent.exited().posix_signal == 9


def test_save_first_lets_the_program_end_by_itself(agent: AgentProcess, script: Script) -> None:
    text = "import time\nfrom outlast.launchers.recorder import stop_asked\nprint('ready', flush=True)\n"
    agent.start(script(text + "while not stop_asked():\n    time.sleep(0.01)\nprint('saved')\n"))
    agent.wait(lambda: "ready" in agent.output())
    assert agent.stop(term_s=10.0, save_first=True).ok
    exited = agent.exited()
    assert (exited.exit_code, exited.asked) == (0, True) and exited.last_words.endswith("saved")


SAVES = """
import time
from outlast.launchers.recorder import current
recorder = current()
for step in (1, 2, 3):
    recorder.step_started(step)
    recorder.step_done(step, loss=1.0 / step, closed=step == 1)
    recorder.phase("save")
    if step == 3:
        time.sleep(300)
    recorder.step_closed(0.5)
    recorder.phase("train")
"""


def test_a_rank_that_dies_in_a_save_had_told_the_step(agent: AgentProcess, script: Script) -> None:
    agent.start(script(SAVES))
    beat = agent.beat(lambda b: b.phase == "save" and b.step_max == 3)
    assert [(s.train_step, s.save_s) for s in beat.steps] == [(1, 0.0), (2, 0.5)]
    agent.stop()
    beat = agent.beat(lambda b: b.state == "clear")
    assert [(s.train_step, s.loss) for s in beat.steps] == [(1, 1.0), (2, 0.5), (3, 1.0 / 3)]


ESCAPES = {
    "own session": "os.setsid()",
    "double fork": "os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0)",
    "other program": "os.setsid(); os.execve('/bin/sleep', ['sleep', '300'], {})",
}


@pytest.mark.parametrize("escape", ESCAPES.values(), ids=ESCAPES)
def test_what_escapes_from_its_group_is_found_and_killed(agent: AgentProcess, script: Script, escape: str) -> None:
    text = f"import os, time\nif os.fork() == 0:\n    {escape}\n    print('child', os.getpid(), flush=True)\n"
    if "exec" in escape:
        text = text.replace(f"    {escape}\n", "").rstrip() + f"\n    {escape}\n"
    agent.start(script(text + "    time.sleep(300)\n" + SLEEP))
    agent.wait(lambda: "child" in agent.output() and "ready" in agent.output())
    child = int(agent.output().split("child", 1)[1].split()[0])
    assert reap.read_proc(child) is not None
    assert agent.stop().ok
    gone = reap.read_proc(child)
    assert gone is None or gone.empty


def test_a_dead_agent_leaves_nothing_behind(agent: AgentProcess, script: Script) -> None:
    text = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(300)\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork():\n        os._exit(0)\n"
        "    print('daemon', flush=True)\n    time.sleep(300)\nos.wait()\n"
    )
    agent.start(script(text + SLEEP), script(SLEEP))
    agent.wait(lambda: {"ready", "daemon"} <= set(agent.output(0).split()) and "ready" in agent.output(1))
    assert len(agent.left()) == 5  # the warm process, two ranks, a child in its own session, a daemon
    agent.process.kill()
    agent.wait(lambda: not agent.left(), why="an empty tree")


def test_a_dead_warm_process_takes_its_ranks_and_is_replaced(agent: AgentProcess, script: Script) -> None:
    agent.start(script(SLEEP))
    agent.wait(lambda: "ready" in agent.output())
    (rank,) = agent.wait(lambda: [p.pid for p in agent.signals(RankPlaced)])
    proc = reap.read_proc(rank)
    assert proc is not None
    os.kill(proc.ppid, signal.SIGKILL)
    exited = agent.exited()
    assert exited.posix_signal == 9 and "warm process" in exited.last_words
    assert agent.stop().ok
    agent.beat(lambda b: b.warm)
    assert agent.start(script("pass"), attempt=2).ok
    assert agent.exited(attempt=2).exit_code == 0


def test_term_to_the_agent_ends_its_ranks(agent: AgentProcess, script: Script) -> None:
    agent.start(script(SLEEP))
    agent.wait(lambda: "ready" in agent.output())
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(15.0) == 143
    assert not agent.left() and agent.exited().asked


def test_a_next_agent_clears_what_a_dead_one_left(make_agent: MakeAgent, script: Script) -> None:
    first = make_agent()
    first.start(script("import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(300)\n" + SLEEP))
    first.wait(lambda: "ready" in first.output())
    (warm,) = [p for p in reap.snapshot().values() if p.ppid == first.process.pid]
    os.kill(warm.pid, signal.SIGSTOP)  # so that it cannot clear up itself
    first.process.kill()
    first.process.wait(5.0)
    assert len(first.left()) == 3
    second = make_agent()
    second.beat(lambda b: b.warm)
    assert not [
        p for p in first.left() if p not in {q.pid for q in reap.snapshot().values() if q.ppid == second.process.pid}
    ]


def test_a_second_agent_of_the_same_node_ends(make_agent: MakeAgent) -> None:
    first = make_agent()
    first.beat()
    second = make_agent()
    assert second.process.wait(15.0) != 0
    first.beat()


def test_kernel_words_in_a_ranks_output_blame_a_program(agent: AgentProcess, script: Script) -> None:
    text = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."
    agent.start(
        script(
            f"print({text!r})\nprint('\\x1b[2J\\x1b]0;title\\x07<script>alert(1)</script>\\x00')\nraise SystemExit(5)"
        )
    )
    exited = agent.exited()
    assert text in exited.last_words and not agent.signals(XidSeen)
    assert "\\x1b[2J" in exited.last_words and "\x1b" not in exited.last_words and "\x00" not in exited.last_words


def test_a_flood_of_output_delays_no_beat(make_agent: MakeAgent, script: Script) -> None:
    agent = make_agent(log_bytes_per_rank=300_000)
    agent.beat(lambda b: b.warm)
    began = len(agent.messages)
    flood = "import sys, time\nuntil = time.monotonic() + 1.5\nwhile time.monotonic() < until:\n"
    agent.start(script(flood + "    sys.stdout.write('x' * 99_999 + '\\n')\nprint('end')\n"))
    assert agent.exited().last_words.endswith("end")
    assert agent.exited().exit_code == 0
    arrived = [at for at, m in zip(agent.times[began:], agent.messages[began:], strict=False) if isinstance(m, Beat)]
    assert max(b - a for a, b in itertools.pairwise(arrived)) < 2.0
    assert agent.wait(lambda: size_of(agent.run_dir.rank(1, 0))) < 600_000


def size_of(directory: Path) -> int | None:
    """Bytes; None where the writer has just put a full log aside, and its next one is not there yet."""
    try:
        return sum(p.stat().st_size for p in directory.iterdir())
    except FileNotFoundError:
        return None


def test_the_kernel_log_is_told_at_once(make_agent: MakeAgent, tmp_path: Path) -> None:
    kernel_log = tmp_path / "kern-a.log"
    kernel_log.write_text("")
    agent = make_agent(kernel_log=str(tmp_path / "kern-%n.log"))
    agent.beat(lambda b: b.warm)
    with kernel_log.open("a") as f:
        f.write("[ 1234.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n")
    (xid,) = agent.wait(lambda: agent.signals(XidSeen))
    assert (xid.code, xid.node) == (79, "a")


def test_a_stopped_rank_is_named_by_its_stack(agent: AgentProcess, script: Script) -> None:
    agent.start(
        script(
            "import time\ndef deep_in_thought():\n"
            "    print('ready', flush=True)\n    time.sleep(300)\ndeep_in_thought()\n"
        )
    )
    agent.wait(lambda: "ready" in agent.output())
    (placed,) = agent.wait(lambda: agent.signals(RankPlaced))
    os.kill(placed.pid, signal.SIGSTOP)
    (stack,) = agent.stacks()
    assert (stack.process_state, stack.waiting) == ("T", False)
    assert stack.stack.splitlines()[-1].startswith("deep_in_thought (")
    agent.wait(lambda: (agent.run_dir.rank(1, placed.rank) / "stack.txt").exists())
    assert agent.stop(term_s=5.0).ok
    assert agent.exited().posix_signal == signal.SIGTERM  # it was continued, so that TERM could reach it


def test_a_command_is_any_program(make_agent: MakeAgent) -> None:
    agent = make_agent(Task(command=("sh", "-c", "echo $RANK $0; kill -USR1 $$"), preload=("json",)))
    agent.start(("sh", "-c", "echo $RANK $0; kill -USR1 $$", "zero"))
    exited = agent.exited()
    assert (exited.posix_signal, exited.last_words) == (10, "0 zero")
    (placed,) = agent.signals(RankPlaced)
    assert placed.node == "a"
    agent.stop()
    agent.start(("no-such-program",), attempt=2)
    assert agent.exited(attempt=2).exit_code == 127


def test_a_module_runs_as_main(make_agent: MakeAgent, tmp_path: Path) -> None:
    (tmp_path / "my_module.py").write_text("import sys\nprint(__name__, __spec__.name, sys.argv[1:])\n")
    agent = make_agent(Task(module="my_module", preload=("json", "no_such_module_at_all"), workdir=str(tmp_path)))
    agent.start(("my_module", "--a"))
    assert agent.exited().last_words == "__main__ my_module ['--a']"


@pytest.mark.megatron
def test_torch_is_imported_once(make_agent: MakeAgent, script: Script, tmp_path: Path) -> None:
    agent = make_agent(Task(script="x.py", preload=("torch",), workdir=str(tmp_path), env={"OMP_NUM_THREADS": "1"}))
    agent.wait(lambda: agent.beat(lambda b: b.warm), 60.0)
    agent.start(
        script(
            "import sys; assert 'torch' in sys.modules\n"
            "import torch\nprint(torch.ones(3).sum(), torch.get_num_threads())"
        )
    )
    assert agent.exited().last_words == "tensor(3.) 1"
