"""RUN.yaml: what is read, which source wins, and every message that a person may see."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.launchers import adapt
from outlast.reliability.config import ReadRun, load_frozen, read_run
from outlast.reliability.config_schema import run_schema
from outlast.reliability.config_shape import SETTINGS
from outlast.reliability.findings import ConfigError
from outlast.reliability.freeze import find_run, freeze, write_durably
from outlast.reliability.identity import Identity, Item, Policy, compare, read_identity, take_identity
from outlast.reliability.rundir import RunDir
from outlast.reliability.runfile import RunFile

Read = Callable[..., ReadRun]

GOOD = """\
name: lm-7b
task:
  script: pretrain_gpt.py
  env: {CUDA_DEVICE_MAX_CONNECTIONS: "1"}
cluster: {partition: train, nodes: 64, nodes_min: 56, spares: 2, gpus_per_node: 8, walltime: 7d}
layout: {tp: 8, pp: 4, cp: 1, ep: 1, may_change: [dp], global_batch: 512}
checkpoint: {every: auto, keep_last: 3}
limits: {attempts_without_progress: 3, drains_per_hour: 2, wait_for_spare: 5min}
"""


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Reads a run file of this text, in a directory with a script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUTLAST_RUN_ROOT", raising=False)
    Path("pretrain_gpt.py").write_text("")
    Path("train.py").write_text("")

    def reading(text: str = GOOD, *settings: str, params: str | None = None) -> ReadRun:
        Path("pretrain.yaml").write_text(text)
        return read_run(
            Path("pretrain.yaml"), settings=settings, params_file=Path(params) if params else None, kinds=adapt
        )

    return reading


def complaints(read: Read, text: str = GOOD, *settings: str, params: str | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, *settings, params=params)
    return [str(finding) for finding in caught.value.findings]


def source_of(got: ReadRun, path: str) -> str:
    return next(one.source for one in got.used if one.path == path)


# ---------------------------------------------------------------- what is read


def test_the_file_of_the_manual_is_read(read: Read, tmp_path: Path) -> None:
    run = read().run
    assert run.cluster.walltime_s == 604800 and run.limits.wait_for_spare_s == 300
    assert run.task.kind == "megatron_lm" and run.task.workdir == str(tmp_path)
    assert (run.checkpoint.every_steps, run.checkpoint.every_s) == (500, 0)
    assert run.run_root == str(tmp_path / "runs")


@pytest.mark.parametrize(
    ("every", "steps", "seconds"),
    [("every: 500 steps", 500, 0), ("every: 20 min", 0, 1200), ("every_s: 90", 0, 90), ("every: auto", 0, 1800)],
)
def test_every_is_steps_or_a_time(read: Read, every: str, steps: int, seconds: float) -> None:
    run = read(f"name: a\ntask: {{script: train.py}}\ncheckpoint: {{{every}}}").run
    assert (run.checkpoint.every_steps, run.checkpoint.every_s) == (steps, seconds)


def test_auto_is_kept_with_the_run_and_a_number_from_a_stronger_source_ends_it(read: Read) -> None:
    text = "name: a\ntask: {module: outlast.launchers.trainer}\ntrain_steps: 9\ncheckpoint: {every: auto}"
    asked = read(text).run.checkpoint
    assert asked.auto
    run = read(text, "checkpoint.every=70 steps").run
    assert (run.checkpoint.auto, run.checkpoint.every_steps) == (False, 70)
    first = read(text.replace("every: auto", "auto: true, every: 70 steps, keep_every: 1000")).run.checkpoint
    assert (first.auto, first.every_steps, first.keep_every) == (True, 70, 1000)


def test_bounds_of_an_interval_in_the_wrong_order(read: Read) -> None:
    with pytest.raises(ConfigError, match="every_min_s"):
        read("name: a\ntask: {script: train.py}\ncheckpoint: {every: auto, every_min: 2h}")


def test_without_a_checkpoint_section_every_is_auto(read: Read) -> None:
    got = read("name: a\ntask: {script: train.py}")
    assert got.run.checkpoint.every_s == 1800 and source_of(got, "$.checkpoint.every_s") == "auto (default)"


def test_command_line_wins_over_params_file_wins_over_run_file(read: Read) -> None:
    Path("more.yaml").write_text("lr: 2.0\nseed: 2\nx: 2")
    text = "name: a\ntask: {script: train.py}\nparams: {lr: 1.0, seed: 1, x: 1, w: 1}"
    got = read(text, "lr=3e-4", "x=", params="more.yaml")
    assert got.run.params == {"lr": 3e-4, "seed": 2, "x": None, "w": 1}
    assert source_of(got, "$.params.lr") == "--set lr=3e-4"
    assert source_of(got, "$.params.seed") == "more.yaml"
    assert source_of(got, "$.params.w") == "pretrain.yaml"
    assert source_of(got, "$.cluster.nodes") == "default"


def test_a_params_file_is_found_beside_the_run_file(read: Read) -> None:
    Path("params").mkdir()
    Path("params/7b.yaml").write_text("lr: 3e-3")
    got = read("name: a\ntask: {script: train.py}\nparams: params/7b.yaml", "lr=1")
    assert got.run.params == {"lr": 1}
    assert read("name: a\ntask: {script: train.py}\nparams: params/7b.yaml").run.params == {"lr": 0.003}


def test_set_reaches_every_setting(read: Read) -> None:
    text = "name: a\ntask: {script: train.py}\ncheckpoint: {every: 10 steps}"
    run = read(
        text,
        "cluster.nodes=4",
        "cluster.walltime=1h",
        "train_steps=60",
        "params.name=b",
        "model.size=7",
        "task.env.N=1",
        "task.args=[a, 'b']",
        "checkpoint.every=5 min",
    ).run
    assert run.cluster.nodes == 4 and run.cluster.walltime_s == 3600 and run.train_steps == 60
    assert run.params == {"name": "b", "model.size": 7}
    assert run.task.env == {"N": "1"} and run.task.args == ("a", "b")
    assert (run.checkpoint.every_steps, run.checkpoint.every_s) == (0, 300)


def test_run_root_comes_from_the_environment_unless_the_file_says_it(
    read: Read, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTLAST_RUN_ROOT", str(tmp_path / "else"))
    got = read("name: a\ntask: {script: train.py}")
    assert got.run.run_root == str(tmp_path / "else") and source_of(got, "$.run_root") == "OUTLAST_RUN_ROOT"
    assert read("name: a\ntask: {script: train.py}\nrun_root: here").run.run_root == str(tmp_path / "here")


# ---------------------------------------------------------------- what is said


def test_all_findings_are_told_at_once_with_path_and_suggestion(read: Read) -> None:
    text = GOOD.replace("drains_per_hour", "drain_per_hour").replace("5min", "5m").replace("nodes: 64", "nodes: many")
    assert complaints(read, text, "cluster.nods=3") == [
        "pretrain.yaml: $.limits.drain_per_hour: no such setting; did you mean drains_per_hour?",
        "--set cluster.nods=3: $.cluster.nods: no such setting; did you mean nodes?",
        "pretrain.yaml: $.cluster.nodes: found 'many', expected a whole number, 1 or more",
        "pretrain.yaml: $.limits.wait_for_spare: found '5m', expected a duration such as 90s, 20min, 7d or 1h30min, "
        "or a number of seconds; did you mean 5min?",
    ]


def test_nodes_min_that_leaves_no_replica(read: Read) -> None:
    assert complaints(read, GOOD.replace("nodes_min: 56", "nodes_min: 3")) == [
        "pretrain.yaml: $.layout: tp 8 x pp 4 needs 32 GPUs a replica; nodes_min 3 x 8 = 24 leaves none. "
        "Raise nodes_min to 4 or lower pp."
    ]
    shrinkable = GOOD.replace("nodes_min: 56", "nodes_min: 3").replace("[dp]", "[dp, pp]")
    assert read(shrinkable).run.nodes_min == 3


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("nodes: 64", "nodes: 63", "$.layout: tp 8 x pp 4 needs 32 GPUs a replica; nodes 63 x 8 = 504 is no multiple"),
        ("nodes: 64, nodes_min: 56", "nodes: 3", "nodes 3 x 8 = 24 are too few. Raise nodes to 4 or lower pp."),
        ("nodes_min: 56", "nodes_min: 65", "$.cluster.nodes_min: 65 is more than nodes 64; expected at most 64"),
        ("[dp]", "[]", "$.layout.may_change: nodes_min 56 is below nodes 64, but nothing may change; expected [dp]"),
        (
            "[dp]",
            "[db]",
            "$.layout.may_change: item 1: found 'db', expected one of dp, tp, pp, cp, ep; did you mean dp?",
        ),
        ("[dp]", "dp", "$.layout.may_change: found 'dp', expected a list of words; write [dp]"),
        ("ep: 1", "ep: 3", "$.layout.ep: 3 does not divide dp 16 x cp 1 = 16; expected a divisor of 16"),
        (
            "global_batch: 512",
            "global_batch: 500",
            "$.layout: global_batch 500 is no multiple of micro_batch 1 x dp 16",
        ),
        ("script: pretrain_gpt.py", "module: a, script: b", None),
        ("script: pretrain_gpt.py", "script: pretrain_gtp.py", "did you mean pretrain_gpt.py?"),
        ("script: pretrain_gpt.py", "kind: plain", "$.task: found none of them, expected exactly one of script"),
        ("script: pretrain_gpt.py", "script: train.py\n  kind: megatron", "did you mean megatron_lm?"),
        ("script: pretrain_gpt.py", "command: [a]\n  kind: megatron_lm", "needs a script or a module, found a command"),
        ("script: pretrain_gpt.py", "command: python x.py", "expected a list of words; write [python, x.py]"),
        ('CONNECTIONS: "1"', "CONNECTIONS: 1", "found 1, expected text; write it in quotes: '1'"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "RANK", "$.task.env.RANK: set for each rank by outlast itself; leave it out"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "A-B", "'A-B' is no name of an environment variable"),
        ("name: lm-7b", "name: lm/7b", "$.name: found 'lm/7b', expected a name of at most 64 letters, digits"),
        ("name: lm-7b", "", "$.name: missing; expected the run's name, such as lm-7b"),
        ("partition: train", "partition: ", "$.cluster.partition: found nothing, expected text"),
        ("partition: train", "keep_last: 3", "no such setting here; did you mean checkpoint.keep_last?"),
        ("partition: train", "zebra: 3", "no such setting; expected one of kind, partition"),
        ("partition: train", "feed: yes", "$.cluster.feed: found 'yes', expected true or false"),
        ("spares: 2", "spares: '2'", "expected a whole number, 0 or more; write it without quotes"),
        ("spares: 2", "spares: 2.5", "found 2.5, expected a whole number, 0 or more"),
        ("spares: 2", "spares: true", "found true, expected a whole number, 0 or more"),
        ("every: auto", "every: 500", "expected auto, a number of steps such as '500 steps'"),
        ("every: auto", "every: 500", "did you mean '500 steps'?"),
        ("every: auto", "every: 20 min", "Megatron-LM saves by train_steps, not by time"),
        ("every: auto", "every: 20 min, every_steps: 3", "given together with $.checkpoint.every_steps"),
        ("walltime: 7d", "walltime: 7d, walltime_s: 5", "given twice, also as $.cluster.walltime"),
        ("walltime: 7d", "walltime: 7-00:00:00", "did you mean 7d?"),
        ("walltime: 7d", "walltime: [7]", "found a list, expected a duration"),
        ("keep_last: 3}", "keep_last: 3}\nparams: {--lr: 3}", "'--lr' is no parameter name"),
        (
            "keep_last: 3}",
            "keep_last: 3}\nparams: {betas: [1, 2]}",
            "arguments that take several words go to task.args",
        ),
        (
            "keep_last: 3}",
            "keep_last: 3}\nparams: {tensor_model_parallel_size: 4}",
            "but layout.tp says 8; leave it out",
        ),
        ("keep_last: 3}", "keep_last: 3}\nparams: 3", "expected a mapping of parameters, or a YAML file's name"),
        ("keep_last: 3}", "keep_last: 3}\nparams: none.yaml", "none.yaml: no such file"),
        ("keep_last: 3}", "keep_last: 3}\nnotify: {webhook_file: no}", "cannot be read: No such file"),
        ("keep_last: 3}", "keep_last: 3}\nrun_root: train.py", "train.py is no directory"),
        ("keep_last: 3}", "keep_last: 3}\nlimits: {lease: 0}", "given twice"),
        ("limits: {", "limits: {lease: 0, ", "$.limits.lease_s: 0 would end every attempt at once"),
        ("limits: {", "limits: [", "expected"),
        ("layout: {", "layout: 3\nlimit: {", "no such setting; did you mean limits?"),
    ],
)
def test_each_message(read: Read, old: str, new: str, words: str | None) -> None:
    assert old in GOOD
    text = GOOD.replace(old, new)
    found = complaints(read, text)
    if words is not None:
        assert any(words in line for line in found), found


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("lr", "found 'lr', expected NAME=VALUE"),
        ("=3", "expected NAME=VALUE"),
        ("lr={a: 1", "line 1, column 6: expected"),
        ("cluster=3", "$.cluster: found 3, expected a mapping of kind, partition"),
        ("cluster.nodes.x=3", "expected a whole number"),
        ("lr=1e999", "expected a finite number"),
        ("lr=99999999999999999999", "expected a number of at most 64 bits"),
        ("task.env.A=\ud800", "without NUL characters and broken UTF-8"),
    ],
)
def test_each_message_about_set(read: Read, setting: str, words: str) -> None:
    found = complaints(read, GOOD, setting)
    assert any(words in line and line.startswith("--set ") for line in found), found


def test_a_missing_file_says_what_is_near(read: Read, tmp_path: Path) -> None:
    read()
    with pytest.raises(ConfigError, match=r"^pretrian.yaml: no such file; did you mean pretrain.yaml\?$"):
        read_run(Path("pretrian.yaml"))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_run(tmp_path)


def test_a_webhook_file_that_others_can_read_is_refused(read: Read) -> None:
    hook = Path("hook")
    hook.write_text("https://example.org")
    hook.chmod(0o644)
    text = GOOD + "notify: {webhook_file: hook}\n"
    assert "has mode 0644, expected 0600: it holds a secret. Run: chmod 600" in complaints(read, text)[0]
    hook.chmod(0o600)
    assert read(text).run.notify.webhook_file == str(hook.absolute())


def test_the_reference_trainer_wants_a_target_and_known_parameters(read: Read) -> None:
    text = (
        "name: a\ntask: {module: outlast.launchers.trainer}\nparams: {head: 4, dropout: x}\n"
        "checkpoint: {every: 3 min}\nlayout: {tp: 1, micro_batch: 2}"
    )
    found = complaints(read, text)
    assert any("$.train_steps: missing" in line for line in found)
    assert any("the reference trainer has no such parameter; did you mean heads?" in line for line in found)
    assert any("$.params.dropout: found 'x', expected float" in line for line in found)
    assert any("saves by train_steps, not by time" in line for line in found)


# ---------------------------------------------------------------- any input

YAMLISH = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["auto", "5 min", "dp"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                sorted({part for key in SETTINGS for part in key} | {"every", "walltime", "wait_for_spare"})
            )
            | st.text(max_size=5),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@pytest.mark.slow
@given(st.text(max_size=300) | YAMLISH.map(lambda tree: json.dumps(tree)), st.lists(st.text(max_size=20), max_size=2))
def test_any_text_gives_a_run_file_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, text: str, settings: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        run = read_run(path, settings=settings, kinds=adapt).run
    except ConfigError as error:
        assert error.findings and all(finding.text for finding in error.findings)
    else:
        assert isinstance(run, RunFile)


@pytest.mark.parametrize(
    "page", ["local", "http://%n:9400/metrics", "https://exporter.site:9400/metrics", "http://[::1]:9400/m"]
)
def test_an_exporters_page_is_local_or_a_url(read: Read, page: str) -> None:
    assert read(GOOD, f"cluster.exporter={page}").run.cluster.exporter == page


@pytest.mark.parametrize("page", ["9400", "ftp://n1/x", "http://user:key@n1/metrics", "file:///etc/passwd", "http://"])
def test_what_is_no_page_is_refused(read: Read, page: str) -> None:
    (said,) = complaints(read, GOOD, f"cluster.exporter='{page}'")
    assert "cluster.exporter" in said and "http://%n:9400/metrics" in said


def test_a_sites_policy_is_found_from_other_nodes_too(read: Read, tmp_path: Path) -> None:
    assert read(GOOD, "cluster.policy=site.yaml").run.cluster.policy == str(tmp_path / "site.yaml")


# ---------------------------------------------------------------- frozen


def test_what_is_frozen_reads_back_equal(read: Read) -> None:
    run = read(GOOD, "lr=2e-5", 'note="a\\u2028b\\x7f\\u0085é"', "seed=1").run
    run_dir = freeze(run, Path(run.run_root))
    frozen = load_frozen(run_dir)
    assert frozen.checkpoint.dir == str(run_dir.checkpoints)
    filled = msgspec.structs.replace(run.checkpoint, dir=str(run_dir.checkpoints))
    assert frozen == msgspec.structs.replace(run, checkpoint=filled)
    assert msgspec.json.decode(run_dir.run_file.read_bytes(), type=RunFile) == frozen
    assert msgspec.yaml.decode(run_dir.run_file.read_bytes(), type=RunFile) == frozen


def test_a_run_directory_is_private_numbered_and_complete(read: Read) -> None:
    run = read().run
    first, second = freeze(run, Path(run.run_root)), freeze(run, Path(run.run_root))
    assert (first.name, second.name) == ("lm-7b-0001", "lm-7b-0002")
    assert stat.S_IMODE(first.root.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in first.root.iterdir() if path.is_file()} == {0o600}
    assert len(bytes.fromhex(first.secret.read_text())) == 32
    assert first.secret.read_text() != second.secret.read_text()
    assert first.epochs.is_dir() and first.requests.is_dir() and first.orphans.is_dir()


def test_a_half_made_directory_is_no_run(read: Read) -> None:
    run = read().run
    run_dir = freeze(run, Path(run.run_root))
    run_dir.run_file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_frozen(run_dir)
    with pytest.raises(ConfigError, match="no such run"):
        find_run("lm-7b-0001", Path(run.run_root))
    assert freeze(run, Path(run.run_root)).name == "lm-7b-0002"


def test_an_edited_frozen_file_is_refused(read: Read) -> None:
    run = read().run
    run_dir = freeze(run, Path(run.run_root))
    run_dir.run_file.write_text("{}")
    with pytest.raises(ConfigError, match="not meant to be edited"):
        load_frozen(run_dir)


def test_a_run_is_found_by_path_or_name_and_near_misses_are_named(read: Read) -> None:
    run = read().run
    run_dir = freeze(run, Path(run.run_root))
    assert find_run("lm-7b-0001", Path(run.run_root)) == run_dir == find_run(str(run_dir.root))
    for word in ("lm-7b", "lm-7b-0002", "lm-7-0001"):
        with pytest.raises(ConfigError, match=r"did you mean lm-7b-0001\?"):
            find_run(word, Path(run.run_root))
    with pytest.raises(ConfigError, match="no such run"):
        find_run("", Path(run.run_root))


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        write_durably(tmp_path / "taken", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.slow
def test_identity_tells_what_changed_and_how_bad_that_is(read: Read) -> None:
    run = read(GOOD, "seed=5").run
    run_dir = freeze(run, Path(run.run_root))
    was = read_identity(run_dir.identity)
    assert was.schema == 1 and '"schema": 1' in run_dir.identity.read_text()
    assert compare(was, take_identity(run, run_dir.name)) == ()
    Path("pretrain_gpt.py").write_text("changed")
    (change,) = compare(was, take_identity(run, run_dir.name))
    assert (change.name, change.policy) == ("script_sha256", Policy.FATAL)
    assert any(item.name == "param_seed" and item.value == "5" for item in was.items)


def test_fatal_changes_come_first_and_new_items_may_drift() -> None:
    def identity(**items: tuple[str, Policy]) -> Identity:
        rows = tuple(Item(name=name, value=value, policy=policy) for name, (value, policy) in items.items())
        return Identity(schema=1, run="a-0001", items=rows)

    was = identity(a=("1", Policy.DRIFT), b=("1", Policy.WARN), c=("1", Policy.FATAL))
    now = identity(a=("2", Policy.DRIFT), b=("2", Policy.WARN), c=("2", Policy.FATAL), d=("1", Policy.FATAL))
    assert [change.name for change in compare(was, now)] == ["c", "b", "a"]


# ---------------------------------------------------------------- schema


def test_the_schema_names_every_setting_short_names_too() -> None:
    schema = run_schema()
    for key in SETTINGS:
        place = schema["properties"]
        for part in key[:-1]:
            place = place[part]["properties"]
        assert key[-1] in place
        assert "default" not in place[key[-1]] or key[-1] != "name"
    assert "walltime" in schema["properties"]["cluster"]["properties"]
    assert "every" in schema["properties"]["checkpoint"]["properties"]
    assert schema["properties"]["cluster"]["properties"]["nodes"]["description"]
    assert schema["additionalProperties"] is False and schema["required"] == ["name", "task"]


def test_run_dir_of_a_relative_path_is_absolute(read: Read) -> None:
    run = read().run
    freeze(run, Path(run.run_root))
    assert find_run("runs/lm-7b-0001") == RunDir(root=Path(os.getcwd()) / "runs/lm-7b-0001")
