"""doctor: each finding of this machine, and what it says to do."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import replace
from pathlib import Path

import pytest

from outlast.launchers import megatron_known
from outlast.launchers.megatron_known import digest_source
from outlast.reliability.cli import site_checks as site
from outlast.reliability.cli.doctor import _look_at_megatron, _look_at_script
from outlast.reliability.cli.root import start
from outlast.reliability.cli.site_checks import Grade, Row
from outlast.reliability.freeze import freeze
from outlast.reliability.runfile import RunFile, Task

SMALL = 1024 * 1024


def test_a_usable_disk_is_measured_and_left_clean(tmp_path: Path) -> None:
    row = site.check_disk("run root", tmp_path / "new", probe_bytes=SMALL)
    assert row.grade in (Grade.OK, Grade.WARNING) and "GB/s write" in row.found
    assert list(tmp_path.iterdir()) == [] and str(tmp_path) in row.found


def test_a_place_that_cannot_be_written_is_unfit(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    row = site.check_disk("run root", tmp_path / "file", probe_bytes=SMALL)
    assert row.grade is Grade.UNFIT and "a file system that all nodes see" in row.do


def test_a_file_system_without_hard_links_is_unfit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")  # as FAT and some object stores answer

    monkeypatch.setattr(site.os, "link", refuse)
    row = site.check_disk("run root", tmp_path, probe_bytes=SMALL)
    assert row.grade is Grade.UNFIT and "Operation not permitted" in row.found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("version", "grade"), [((3, 10), Grade.UNFIT), ((3, 11), Grade.OK), ((3, 13), Grade.NOTE)])
def test_python_versions(version: tuple[int, ...], grade: Grade) -> None:
    assert [row.grade for row in site.check_python(version)] == [grade]


@pytest.mark.parametrize(
    ("versions", "kind", "grades"),
    [
        ({"torch": "2.13.0+cpu", "megatron-core": "0.16.1", "numpy": "2.4.6"}, "reference", ["ok", "ok", "ok"]),
        ({"torch": "2.9.0", "megatron-core": "0.19.2", "numpy": "1.26"}, "reference", ["warning"] * 3),
        ({}, "reference", ["unfit"] * 3),
        ({}, "megatron_lm", ["unfit", "note", "unfit"]),
        ({}, "plain", ["note"] * 3),
    ],
)
def test_packages_beside_what_was_tested(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], kind: str, grades: list[str]
) -> None:
    monkeypatch.setattr(site, "_version", lambda package: versions.get(package, ""))
    rows = list(site.check_packages(RunFile(name="a", task=Task(script="x", kind=kind))))
    assert [row.grade for row in rows] == grades
    assert all(row.do for row in rows if row.grade in (Grade.UNFIT, Grade.WARNING))


def test_packages_of_a_container_are_not_looked_for_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "_version", lambda package: "")
    run = RunFile(name="a", task=Task(script="x", kind="reference", container="/images/a.sqsh"))
    assert {row.grade for row in site.check_packages(run)} == {Grade.NOTE}


def test_a_package_of_our_name_beside_the_script_is_unfit(tmp_path: Path) -> None:
    (tmp_path / "outlast").mkdir()
    run = RunFile(name="a", task=Task(script="train.py", workdir=str(tmp_path)))
    assert {row.grade for row in site.check_clashes([], run)} == {Grade.OK}  # a folder alone hides nothing
    (tmp_path / "outlast" / "__init__.py").write_text("")
    assert [row.grade for row in site.check_clashes([], run)] == [Grade.UNFIT]
    (tmp_path / "slurm.py").write_text("")
    assert [row.grade for row in site.check_clashes([str(tmp_path)], None)] == [Grade.UNFIT, Grade.NOTE]


def test_our_own_package_is_no_clash() -> None:
    ours = Path(site.__file__).parents[3]
    assert {row.grade for row in site.check_clashes([str(ours)], None)} == {Grade.OK}


def a_site(tmp_path: Path, text: str, version: str) -> importlib.metadata.Distribution:
    """An installed megatron-core whose distrib_optimizer.py is this."""
    module = tmp_path / "megatron" / "core" / "optimizer" / "distrib_optimizer.py"
    module.parent.mkdir(parents=True, exist_ok=True)
    module.write_text(text)
    info = tmp_path / f"megatron_core-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {version}\n")
    return importlib.metadata.Distribution.at(info)


OPTIMIZER = """class DistributedOptimizer:
    @torch.no_grad()
    def load_state_dict(self, state_dict):
        return 1

    def other(self):
        pass
"""


@pytest.mark.parametrize(
    ("text", "version", "words"),
    [
        (OPTIMIZER, "0.16.1", "mended; 0.16.1 itself: after a restore"),
        (OPTIMIZER, "0.19.2", "0.19.2: after a restore all parameters share"),
        (OPTIMIZER.replace("return 1", "return 2"), "0.19.2", "load_state_dict has another source"),
        (OPTIMIZER.replace("@torch.no_grad()", "@other"), "0.16.1", "load_state_dict has another source"),
        (OPTIMIZER.replace("pass", "return 3"), "0.16.1", "mended; "),
        (OPTIMIZER.replace("load_state", "load_no_state"), "0.19.2", "load_state_dict is gone"),
        ("class DistributedOptimizer(:", "0.19.2", "is gone"),
    ],
)
def test_faults_of_the_installed_megatron_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, version: str, words: str
) -> None:
    known = replace(megatron_known.KNOWN[0], source_sha256=digest_source(OPTIMIZER, megatron_known.KNOWN[0].function))
    monkeypatch.setattr(megatron_known, "KNOWN", (known,))
    monkeypatch.setattr(megatron_known, "GUARDED", ())
    package = a_site(tmp_path, text, version)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _name: package)
    (row,) = _look_at_megatron("reference")
    assert row.subject == "megatron shared_step" and words in row.found
    assert row.grade is (Grade.OK if "mended; " in words else Grade.WARNING)
    assert bool(row.do) == (row.grade is Grade.WARNING)
    assert list(_look_at_megatron("plain")) == []


UPSTREAM = (
    "padded_buckets",
    "shared_step",
    "fresh_optimizer",
    "step_not_loaded",
    "persistent_worker",
    "hanging_wait",
    "stale_model",
    "silent_bit_flip",
    "chained_optimizers",
    "missing_gemm",
)


def test_each_upstream_fault_has_a_row_that_tells_whose_it_is_and_what_answers_it() -> None:
    rows = {row.subject.partition(" ")[2]: row for row in _look_at_megatron("reference")}
    assert set(rows) == set(UPSTREAM)
    assert {row.grade for row in rows.values()} == {Grade.OK}, "the pinned versions are the ones that were read"
    assert rows["silent_bit_flip"].subject.startswith("torch ") and "2.13" in rows["silent_bit_flip"].found
    assert rows["hanging_wait"].found.startswith("not used: ") and "0.16.1 itself: " in rows["hanging_wait"].found


def test_a_fault_that_is_answered_whatever_is_installed_is_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = replace(megatron_known.GUARDED[0], module=megatron_known.KNOWN[0].module)
    monkeypatch.setattr(megatron_known, "KNOWN", ())
    monkeypatch.setattr(megatron_known, "GUARDED", (fault,))
    package = a_site(tmp_path, OPTIMIZER, "0.19.2")
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _name: package)
    (row,) = _look_at_megatron("reference")
    assert row.grade is Grade.NOTE and "whether 0.19.2 still has it nobody has read" in row.found


@pytest.mark.parametrize(
    ("text", "grade"),
    [("warn('--async-save is not supported. Disabling --async-save.')", Grade.OK), ("pass", None), (None, Grade.NOTE)],
)
def test_whether_the_scripts_megatron_lm_saves_synchronously_without_a_word(
    tmp_path: Path, text: str | None, grade: Grade | None
) -> None:
    if text is not None:
        (tmp_path / "megatron" / "training").mkdir(parents=True)
        (tmp_path / "megatron" / "training" / "arguments.py").write_text(text)
    run = RunFile(name="a", task=Task(script="pretrain_gpt.py", kind="megatron_lm", workdir=str(tmp_path)))
    assert [row.grade for row in _look_at_script(run)] == ([grade] if grade else [])
    plain = RunFile(name="a", task=Task(script="pretrain_gpt.py", kind="plain", workdir=str(tmp_path)))
    assert list(_look_at_script(plain)) == list(_look_at_script(None)) == []


def test_where_no_megatron_core_is_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "distribution", none)
    assert list(_look_at_megatron("")) == []


def test_an_open_secret_is_unfit(tmp_path: Path) -> None:
    run_dir = freeze(RunFile(name="a", task=Task(script="x")), tmp_path)
    assert [row.grade for row in site.check_secrets(tmp_path)] == [Grade.OK]
    run_dir.secret.chmod(0o640)
    (row,) = site.check_secrets(tmp_path)
    assert row.grade is Grade.UNFIT and f"chmod 600 {run_dir.secret}" in row.do


@pytest.mark.slow
def test_exit_code_4_and_data_where_something_is_unfit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(site, "PROBE_BYTES", SMALL)
    Path("train.py").write_text("")
    Path("run.yaml").write_text("name: a\ntask: {script: train.py}\ncluster: {kind: local}\n")
    assert start(["doctor", "run.yaml", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["fit"] is True and {row["subject"] for row in got["findings"]} >= {"python", "run root", "secrets"}
    bad = Row(subject="slurmctld", grade=Grade.UNFIT, found="\x1b[2J silent", do="call the admin")
    monkeypatch.setattr(site, "look", lambda run, root: iter((bad,)))
    assert start(["doctor", "run.yaml"]) == 4
    out = capsys.readouterr().out
    assert "slurmctld" in out and "-> call the admin" in out and "\x1b[2J" not in out
    assert start(["doctor", "none.yaml"]) == 2
