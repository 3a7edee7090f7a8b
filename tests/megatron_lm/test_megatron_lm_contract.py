"""The names that outlast hooks exist, and are called as the hooks need it: in the stand-in and in the real tree."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from outlast.launchers.megatron_lm_names import ASYNC, FAULT_TOLERANCE, NEEDED, RANDOM, RERUN, SAVED, TRAINING

STANDIN = Path(__file__).parent / "standin"
CORES_OWN = (RERUN, RANDOM)
"""From the wheel, for the stand-in."""


def tree_of(which: str) -> Path:
    if which == "standin":
        return STANDIN
    named = os.environ.get("OUTLAST_MEGATRON_LM", "")
    assert named, "OUTLAST_MEGATRON_LM: expected a work tree of Megatron-LM core_v0.16.1"
    return Path(named)


@pytest.fixture(params=["standin", pytest.param("megatron_lm", marks=pytest.mark.megatron_lm)])
def tree(request: pytest.FixtureRequest) -> Path:
    return tree_of(request.param)


def parse(tree: Path, module: str) -> ast.Module:
    return ast.parse((tree / (module.replace(".", "/") + ".py")).read_text())


def names_in(module: ast.Module) -> set[str]:
    """What is bound at the top of it, and `Class.member` for classes."""
    found: set[str] = set()
    for node in module.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
                if isinstance(node, ast.ClassDef):
                    found |= {f"{name}.{member}" for member in names_in(ast.Module(body=node.body, type_ignores=[]))}
            case ast.ImportFrom(names=names) | ast.Import(names=names):
                found |= {alias.asname or alias.name for alias in names}
            case ast.Assign(targets=targets):
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def calls_in(module: ast.Module) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(module) if isinstance(node, ast.Call)}


def test_every_needed_name_is_there(tree: Path) -> None:
    for module, names in NEEDED.items():
        if tree == STANDIN and module in CORES_OWN:
            continue
        missing = set(names) - names_in(parse(tree, module))
        assert not missing, f"{module}: {missing}"
    assert "init_persistent_async_worker" in names_in(parse(tree, ASYNC))


def test_changed_attributes_are_what_is_called(tree: Path) -> None:
    training, checkpointing = parse(tree, TRAINING), parse(tree, "megatron.training.checkpointing")
    called = calls_in(training)
    for name in NEEDED[FAULT_TOLERANCE]:
        assert f"ft_integration.{name}" in called, "imported by name: a changed attribute would not be called"
    for name in ("train", "train_step", "load_checkpoint", "save_checkpoint", "save_checkpoint_and_time"):
        assert name in called
    for name in NEEDED[SAVED]:
        assert f"wandb_utils.{name}" in calls_in(checkpointing)


def test_train_steps_result_has_its_places(tree: Path) -> None:
    (train_step,) = (n for n in parse(tree, TRAINING).body if isinstance(n, ast.FunctionDef) and n.name == "train_step")
    returns = [n.value for n in ast.walk(train_step) if isinstance(n, ast.Return)]
    tuples = [one for one in returns if isinstance(one, ast.Tuple)]
    assert tuples and len(tuples) == len(returns)
    for one in tuples:
        assert [ast.unparse(one.elts[place]) for place in (3, 4)] == ["should_exit", "exit_code"]
        assert ast.unparse(one.elts[5]) in ("grad_norm", "None")


@pytest.mark.megatron_lm
def test_the_real_core_is_the_wheels() -> None:
    """The mends and the rerun machine that the stand-in uses are those of the tree."""
    import megatron.core

    wheel, tree = Path(megatron.core.__file__).parent, tree_of("megatron_lm") / "megatron" / "core"
    for name in ("rerun_state_machine.py", "optimizer/distrib_optimizer.py", "dist_checkpointing/serialization.py"):
        assert (wheel / name).read_bytes() == (tree / name).read_bytes(), name
