"""The node gate: real files, processes and ports, a compiled stand-in for the GPU library, and its start-up time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outlast.monitors import gate_checks, gate_child
from outlast.monitors.gate import GateConfig, UsageError, main, read_config, read_words, run_gate

FAKE = Path(__file__).parent.parent / "data" / "nvml" / "fake_nvml.c"


def bad(config: GateConfig) -> dict[str, str]:
    return {f.check: f.outcome for f in run_gate(config).bad}


def test_a_well_node_is_well_and_has_a_free_port(tmp_path: Path) -> None:
    report = run_gate(GateConfig(path=(str(tmp_path),), port="127.0.0.1", marker=("OUTLAST_NOBODY_HAS_THIS=1",)))
    assert (report.outcome, report.bad) == ("well", ())
    assert report.free_port > 1023
    assert os.listdir(tmp_path) == []  # the probe took its file away


def test_a_missing_directory_is_a_fault_and_a_refused_one_unknown(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    assert bad(GateConfig(path=(gone,))) == {f"writable {gone}": "fault"}
    assert bad(GateConfig(path=("/proc/1",)))["writable /proc/1"] in ("fault", "unknown")
    refused = gate_checks.judge_write("/x", "13 Permission denied", "", 30.0)
    assert [f.outcome for f in refused] == ["unknown"]
    full = gate_checks.judge_write("/x", "28 No space left on device", "", 30.0)
    assert [f.outcome for f in full] == ["fault"]


def test_a_mount_that_is_not_there_is_a_fault(tmp_path: Path) -> None:
    assert bad(GateConfig(mount=("/proc",))) == {}
    assert bad(GateConfig(mount=(str(tmp_path),))) == {f"mounted {tmp_path}": "fault"}


def test_little_shared_memory_and_a_lying_clock() -> None:
    assert bad(GateConfig(shm_bytes=1 << 60)) == {"shm": "fault"}
    skewed = gate_checks.judge_write("/x", "ok -120.0", "", 30.0)
    assert [(f.check, f.outcome) for f in skewed] == [("writable /x", "well"), ("clock", "unknown")]


def test_a_process_with_a_marker_is_a_leftover(tmp_path: Path) -> None:
    marker = f"OUTLAST_TEST_MARKER={os.getpid()}-{time.monotonic_ns()}"
    name, _, value = marker.partition("=")
    left = subprocess.Popen(["sleep", "60"], env={**os.environ, name: value})
    try:
        assert bad(GateConfig(marker=(marker,))) == {"leftovers": "fault"}
        assert bad(GateConfig(marker=(marker,), allow_pids=(left.pid,))) == {}
    finally:
        left.kill()
        left.wait(10)
    assert bad(GateConfig(marker=(marker,))) == {}


def test_infiniband_ports_by_sysfs(tmp_path: Path) -> None:
    for name, state, physical in (("mlx5_0", "4: ACTIVE", "5: LinkUp"), ("mlx5_1", "1: DOWN", "3: Disabled")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "phys_state").write_text(physical + "\n")
    outcomes = {f.check: f.outcome for f in gate_checks.check_ib(["all"], str(tmp_path))}
    assert outcomes == {"ib mlx5_0:1": "well", "ib mlx5_1:1": "fault"}
    assert [f.outcome for f in gate_checks.check_ib(["mlx5_9:1"], str(tmp_path))] == ["fault"]
    assert [f.outcome for f in gate_checks.check_ib(["all"], str(tmp_path / "none"))] == ["fault"]


def sleep_long() -> str:
    time.sleep(60)
    return ""


def fail() -> str:
    raise RuntimeError("broken")


@pytest.mark.slow
def test_a_hanging_check_is_unknown_and_is_not_piled_up() -> None:
    name = f"test {os.getpid()} {time.monotonic_ns()}"
    began = time.monotonic()
    child = gate_child.start(name, sleep_long)
    second = gate_child.start(name, sleep_long)
    assert second.pid == 0 and "still stuck" in second.why
    assert gate_child.collect(child, time.monotonic() + 0.2) == ("", "no answer in time")
    assert time.monotonic() - began < 5
    again = gate_child.start(name, lambda: "x" * 200_000)
    answer, why = gate_child.collect(again, time.monotonic() + 10)
    assert (len(answer), why) == (gate_child.ANSWER_BYTES, "")
    broken = gate_child.collect(gate_child.start(name, fail), time.monotonic() + 10)
    assert broken == ("", "RuntimeError: broken")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "8"], "no such option"),
        (["--gpus", "eight"], "expected int"),
        (["--gpus"], "expected a value"),
        (["--config", "/nowhere.toml"], "No such file"),
    ],
)
def test_wrong_use_exits_2_but_never_as_a_hook(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert main([*words, "--hook"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_sites_file_and_options_over_it(tmp_path: Path) -> None:
    site = tmp_path / "check.toml"
    site.write_text('path = ["/scratch"]\ngpus = 8\nclock_skew = 10\n')
    asked = read_words(["--config", str(site), "--gpus=4", "--skip", "ib", "--json", "--node", "n7"])
    assert (asked.config.path, asked.config.gpus, asked.config.clock_skew) == (("/scratch",), 4, 10.0)
    assert (asked.config.skip, asked.node, asked.json) == (("ib",), "n7", True)
    assert "--node" not in asked.rest and "--gpus" in asked.rest
    for text, message in (("gpu = 8", "no such setting"), ("path = 3", "expected a list"), ("gpus =", "check.toml")):
        site.write_text(text)
        with pytest.raises(UsageError, match=message):
            read_config(str(site))


def test_exit_codes_and_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--path", str(tmp_path)]) == 0
    assert capsys.readouterr() == ("", "")
    gone = str(tmp_path / "gone")
    assert main(["--path", gone]) == 1
    assert "expected a writable directory" in capsys.readouterr().out
    assert main(["--path", gone, "--hook"]) == 1
    assert main(["--path", gone, "--skip", "writable"]) == 0
    capsys.readouterr()
    assert main(["--path", gone, "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert body["outcome"] == "fault" and body["findings"][0].startswith(f"writable {gone}: fault")
    assert main(["--help"]) == 0 and "usage" in capsys.readouterr().out


@pytest.fixture(scope="module")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("nvml")
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler is needed: apt-get install gcc"
    target = place / "libnvidia-ml.so.1"
    words = [
        compiler,
        "-shared",
        "-fPIC",
        "-Wall",
        "-Werror",
        "-Wl,-soname,libnvidia-ml.so.1",
        "-o",
        str(target),
        str(FAKE),
    ]
    subprocess.run(words, check=True, timeout=60)
    return place


def ask(place: Path, *words: str, **env: str) -> tuple[int, dict[str, object]]:
    """The gate in a process of its own, with the unmodified binding on the compiled library."""
    words = (sys.executable, "-m", "outlast.monitors.gate", "--json", *words)
    done = subprocess.run(
        words, env={**os.environ, "LD_LIBRARY_PATH": str(place), **env}, capture_output=True, timeout=60, check=False
    )
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_gpus_that_are_well_and_one_too_few(fake_nvml: Path) -> None:
    code, said = ask(fake_nvml, "--gpus", "2")
    assert (code, said["findings"]) == (0, [])
    code, said = ask(fake_nvml, "--gpus", "8")
    assert (code, said["findings"]) == (1, ["gpu count: fault: 2 GPUs, expected 8"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("ecc", "3 uncorrectable errors"),
        ("remap", "a row remap failed"),
        ("retired", "page retirement waits"),
        ("width", "PCIe x8, expected x16"),
        ("throttle", "hardware thermal slowdown"),
        ("memory", "bytes in use"),
        ("lost", "the GPU does not answer"),
        ("link", "1 of its NVLinks are down"),
        ("recovery", "recovery action 2"),
    ],
)
def test_each_gpu_fault_is_found(fake_nvml: Path, fault: str, words: str) -> None:
    code, said = ask(fake_nvml, "--gpus", "2", FAKE_NVML_FAULT=fault)
    assert code == 1
    findings = said["findings"]
    assert isinstance(findings, list) and len(findings) == 1 and words in findings[0]


@pytest.mark.slow
def test_a_library_that_hangs_is_unknown_in_time(fake_nvml: Path) -> None:
    began = time.monotonic()
    code, said = ask(fake_nvml, "--gpus", "2", "--deadline", "0.3", FAKE_NVML_HANG="1")
    assert (code, said["findings"]) == (75, ["gpu: unknown: NVML: no answer in time"])
    assert time.monotonic() - began < 10
    code, said = ask(fake_nvml, "--gpus", "2", "--deadline", "0.3", "--hook", FAKE_NVML_HANG="1")
    assert (code, said["outcome"]) == (0, "unknown")  # as a hook, what is not proven must not drain
    code, said = ask(fake_nvml, "--gpus", "2", "--hook", FAKE_NVML_FAULT="lost")
    assert (code, said["outcome"]) == (1, "fault")


def test_no_library_and_no_gpus_wanted_is_well() -> None:
    report = run_gate(GateConfig(gpus=0))
    assert report.outcome == "well"


@pytest.mark.slow
def test_it_starts_in_time_and_imports_nothing_heavy(fake_nvml: Path) -> None:
    def best_s(*words: str) -> float:
        took: list[float] = []
        for _ in range(7):
            began = time.perf_counter()
            ask(fake_nvml, *words)
            took.append(time.perf_counter() - began)
        return min(took)

    assert best_s() < 0.120  # 60 ms on a quiet machine; the benchmark holds that figure
    assert best_s("--gpus", "2") < 0.240
    code = (
        "import sys; from outlast.monitors.gate import main; main([]); "
        "heavy = {'msgspec', 'click', 'rich', 'yaml', 'psutil', 'argparse'}; "
        "print(sorted({m.partition('.')[0] for m in sys.modules} & heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True, text=True)
    assert done.stdout.strip() == "[]"
