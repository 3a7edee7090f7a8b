"""What each kind of program is told, and the environment of its ranks."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.launchers.adapt import as_flags, complain, for_run, kind_of, settle
from outlast.launchers.rank_env import rank_env
from outlast.launchers.trainer_args import parse_settings
from outlast.reliability.elastic import places, wanted
from outlast.reliability.model import Layout, Node, Plan
from outlast.reliability.runfile import Checkpoint, Cluster, LayoutAsked, RunFile, Task


def a_run(**changes: object) -> RunFile:
    run = RunFile(
        name="a",
        task=Task(script="pretrain_gpt.py"),
        cluster=Cluster(nodes=2, ranks_per_node=2),
        layout=LayoutAsked(tp=2, global_batch=8, micro_batch=2),
        checkpoint=Checkpoint(dir="/ck", every_steps=10),
        train_steps=60,
    )
    return msgspec.structs.replace(run, **changes)


def a_plan(*, restore_step: int = 0) -> Plan:
    layout = Layout(tp=2, dp=2)
    nodes = (Node("n1"), Node("n2"))
    return Plan(
        attempt=3,
        layout=layout,
        nodes=nodes,
        ranks=places(layout, nodes, 2),
        restore_step=restore_step,
        restore_path=f"/ck/iter_{restore_step:07d}" if restore_step else "",
        micro_batch=2,
    )


def flags_of(argv: tuple[str, ...]) -> dict[str, str]:
    """--name -> the word after it, or '' for a bare flag. A flag that stands twice fails the test."""
    found: dict[str, str] = {}
    for word, following in zip(argv, (*argv[1:], "--"), strict=True):
        if word.startswith("--"):
            assert word not in found, f"{word} stands twice in {argv}"
            found[word] = "" if following.startswith("--") else following
    return found


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        (Task(script="pretrain_gpt.py"), "megatron_lm"),
        (Task(script="/opt/mlm/pretrain_mamba.py"), "megatron_lm"),
        (Task(script="pretrain_mine.py"), "plain"),
        (Task(script="train.py"), "plain"),
        (Task(module="outlast.launchers.trainer"), "reference"),
        (Task(module="mine"), "plain"),
        (Task(command=("python", "pretrain_gpt.py")), "plain"),
        (Task(script="train.py", kind="megatron_lm"), "megatron_lm"),
    ],
)
def test_auto_goes_by_the_program(task: Task, kind: str) -> None:
    assert kind_of(a_run(task=task)) == kind == settle(a_run(task=task)).task.kind


def test_parameters_become_flags() -> None:
    assert as_flags({"lr": 3e-3, "seq_length": 64, "bf16": True, "x": False, "y": None, "z": "a b", "w": "-v"}) == (
        "--lr",
        "0.003",
        "--seq-length",
        "64",
        "--bf16",
        "--z",
        "a b",
        "--w=-v",
    )


def test_megatron_lm_gets_layout_saving_and_end() -> None:
    argv = for_run(a_run()).argv(a_run(params={"lr": 1e-3}), a_plan())
    assert argv[0] == "pretrain_gpt.py"
    assert flags_of(argv) == {
        "--tensor-model-parallel-size": "2",
        "--pipeline-model-parallel-size": "1",
        "--context-parallel-size": "1",
        "--expert-model-parallel-size": "1",
        "--global-batch-size": "8",
        "--micro-batch-size": "2",
        "--save": "/ck",
        "--save-interval": "10",
        "--ckpt-format": "torch_dist",
        "--exit-signal-handler": "",
        "--use-distributed-optimizer": "",
        "--dist-ckpt-optim-fully-reshardable": "",
        "--train-iters": "60",
        "--distributed-backend": "gloo",
        "--lr": "0.001",
    }


def test_megatron_lm_on_gpus_chooses_its_own_backend() -> None:
    run = a_run(cluster=Cluster(nodes=2, gpus_per_node=2))
    assert "--distributed-backend" not in for_run(run).argv(run, a_plan())


def test_megatron_lm_restores_one_step_and_never_begins_anew_silently() -> None:
    run = a_run(params={"load": "/base", "finetune": True, "no_load_optim": True})
    first = flags_of(for_run(run).argv(run, a_plan()))
    assert first["--load"] == "/base" and "--finetune" in first
    later = flags_of(for_run(run).argv(run, a_plan(restore_step=40)))
    assert (later["--load"], later["--ckpt-step"]) == ("/ck", "40")
    assert "--exit-on-missing-checkpoint" in later
    assert "--finetune" not in later and "--no-load-optim" not in later


def test_megatron_lm_without_the_distributed_optimizer_if_the_user_says_so() -> None:
    run = a_run(params={"use_distributed_optimizer": False})
    assert not {"--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"} & set(
        for_run(run).argv(run, a_plan())
    )
    assert complain(run) == ()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"tensor_model_parallel_size": 4}, "found 4, but layout.tp says 2; leave it out"),
        ({"tensor-model-parallel-size": 4}, "found 4, but layout.tp says 2"),
        ({"global_batch_size": 16}, "but layout.global_batch says 8"),
        ({"train_iters": 100}, "but train_steps says 60"),
        ({"save": "/other"}, "but checkpoint.dir says /ck"),
        ({"ckpt_format": "zarr"}, "says torch_dist"),
        ({"exit_signal_handler": False}, "found false"),
        ({"num_attention_heads": 3}, "3 attention heads do not divide over tp 2"),
        ({"num_experts": 3, "e": 1}, None),
    ],
)
def test_megatron_lm_refuses_what_contradicts(params: dict[str, int], words: str | None) -> None:
    found = [text for _, text in complain(a_run(params=params))]
    assert (words is None and not found) or any(words in text for text in found if words), found


def test_the_same_said_twice_is_no_contradiction() -> None:
    run = a_run(params={"tensor_model_parallel_size": 2, "train_iters": 60})
    assert complain(run) == ()
    assert flags_of(for_run(run).argv(run, a_plan()))["--train-iters"] == "60"


def test_settle_takes_end_and_interval_from_megatron_lms_own_parameters() -> None:
    run = settle(
        a_run(train_steps=0, checkpoint=Checkpoint(dir="/ck"), params={"train_iters": 90, "save_interval": 30})
    )
    assert (run.train_steps, run.checkpoint.every_steps, complain(run)) == (90, 30, ())


@pytest.mark.parametrize(
    ("layout", "params", "words"),
    [
        (Layout(tp=2, pp=2, dp=1), {"num_layers": 3}, "3 layers do not divide over pp 2"),
        (Layout(tp=2, pp=2, dp=1), {"num_layers": 3, "decoder_first_pipeline_num_layers": 1}, ""),
        (Layout(tp=1, ep=2, dp=4), {}, "ep 2 without experts"),
        (Layout(tp=1, ep=2, dp=4), {"num_experts": 3}, "3 experts do not divide over ep 2"),
        (Layout(tp=1, ep=2, dp=3), {"num_experts": 4}, "ep 2 does not divide dp x cp = 3"),
        (Layout(tp=1, dp=3), {}, "global_batch 8 is no multiple of micro_batch 2 x dp 3 = 6; expected for example 6"),
        (Layout(tp=1, cp=2, dp=2), {"seq_length": 6}, "seq_length 6 does not divide by 2 x cp 2"),
        (Layout(tp=4), {"num_query_groups": 6}, "6 query groups do not divide over tp 4"),
        (Layout(tp=4), {"num_query_groups": 2}, ""),
        (Layout(tp=2, dp=2), {"num_layers": 3, "num_attention_heads": 4}, ""),
    ],
)
def test_megatron_lms_legal_layouts(layout: Layout, params: dict[str, int], words: str) -> None:
    run = a_run(params=params)
    found = for_run(run).legal(run, layout)
    assert words in found and bool(found) == bool(words)


def reference(**changes: object) -> RunFile:
    return settle(a_run(task=Task(module="outlast.launchers.trainer"), **changes))


def test_the_reference_trainer_understands_every_flag() -> None:
    run = reference(params={"lr": 1e-3, "overlap": True, "experts": None}, run_root="/runs")
    argv = for_run(run).argv(run, a_plan(restore_step=20))
    assert argv[0] == "outlast.launchers.trainer"
    settings = parse_settings(argv[1:])
    assert (settings.tp, settings.train_steps, settings.global_batch, settings.micro_batch) == (2, 60, 8, 2)
    assert settings.checkpoint_dir == Path("/ck") and settings.restore_dir == Path("/ck/iter_0000020")
    assert settings.save_every == 10 and settings.lr == 1e-3 and settings.overlap
    assert settings.data_dir == Path("/runs/reference-data")
    assert parse_settings(for_run(run).argv(run, a_plan())[1:]).restore_dir is None


def test_the_reference_trainers_legal_layouts_are_its_own() -> None:
    run = reference(params={"heads": 4})
    assert for_run(run).legal(run, Layout(tp=2, dp=2)) == ""
    assert "heads" in for_run(run).legal(reference(params={"heads": 3, "hidden": 96}), Layout(tp=2, dp=2))
    assert "cp 2" in for_run(run).legal(run, Layout(cp=2))


def test_a_plain_program_gets_its_restore_in_the_environment_and_nothing_else() -> None:
    run = a_run(task=Task(command=("./train", "-v"), args=("last",), env={"A": "1"}), params={"lr": 1})
    kind = for_run(run)
    assert kind.argv(run, a_plan()) == ("./train", "-v", "--lr", "1", "last")
    assert kind.env(run, a_plan()) == {"A": "1"}
    assert kind.env(run, a_plan(restore_step=30)) == {
        "A": "1",
        "OUTLAST_RESTORE_DIR": "/ck/iter_0000030",
        "OUTLAST_RESTORE_STEP": "30",
    }
    assert kind.preload(run) == () and kind.legal(run, Layout(tp=7)) == ""


@given(nodes=st.integers(1, 9), nodes_min=st.integers(1, 9), each=st.integers(1, 4), micro=st.integers(1, 3))
def test_a_plain_program_may_use_all_its_nodes(nodes: int, nodes_min: int, each: int, micro: int) -> None:
    cluster = Cluster(nodes=nodes, nodes_min=min(nodes, nodes_min), ranks_per_node=each)
    asked = LayoutAsked(global_batch=8, micro_batch=micro)
    run = settle(a_run(task=Task(command=("x",)), cluster=cluster, layout=asked))
    assert wanted(run.layout, nodes=nodes, ranks_per_node=each).world_size == nodes * each


def test_ranks_find_what_torchrun_would_give_them() -> None:
    run, plan = a_run(task=Task(script="x.py", env={"RANK": "9", "MINE": "1"})), a_plan()
    envs = [
        rank_env(
            run,
            plan,
            place,
            master_addr="10.0.0.1",
            master_port=29500,
            run_dir=Path("/runs/a-0001"),
            program={"MINE": "2"},
        )
        for place in plan.ranks
    ]
    assert [env["RANK"] for env in envs] == ["0", "1", "2", "3"] == [env["ROLE_RANK"] for env in envs]
    assert [env["LOCAL_RANK"] for env in envs] == ["0", "1", "0", "1"]
    assert [env["NODE_RANK"] for env in envs] == ["0", "0", "1", "1"] == [env["GROUP_RANK"] for env in envs]
    last = envs[-1]
    assert (last["WORLD_SIZE"], last["LOCAL_WORLD_SIZE"], last["GROUP_WORLD_SIZE"]) == ("4", "2", "2")
    assert (last["MASTER_ADDR"], last["MASTER_PORT"]) == ("10.0.0.1", "29500")
    assert last["TORCHELASTIC_RESTART_COUNT"] == "2" and last["TORCHELASTIC_RUN_ID"] == "a-0001"
    assert (last["OUTLAST_RUN_DIR"], last["OUTLAST_ATTEMPT"], last["OUTLAST_NODE"]) == ("/runs/a-0001", "3", "n2")
    assert last["MINE"] == "2" and last["OMP_NUM_THREADS"] == "1"


def test_threads_are_the_users_where_they_said_so() -> None:
    plan = a_plan()

    def env(run: RunFile, **inherited: str) -> dict[str, str]:
        place = plan.ranks[0]
        return rank_env(
            run, plan, place, master_addr="h", master_port=1, run_dir=Path("/r/a-0001"), inherited=inherited
        )

    assert env(a_run(task=Task(script="x", env={"OMP_NUM_THREADS": "4"})))["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS" not in env(a_run(), OMP_NUM_THREADS="8")
