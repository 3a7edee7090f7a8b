"""--async-save of plain Megatron-LM turns synchronous with no more than a warning; ours refuses it by name."""

from __future__ import annotations

import argparse
import ast
import os
from pathlib import Path

import pytest

from outlast.launchers.adapt import complain, settle
from outlast.launchers.megatron_known import turns_async_off
from outlast.reliability.runfile import RunFile, Task


@pytest.mark.megatron_lm
def test_plain_megatron_lm_turns_it_off_and_goes_on() -> None:
    tree = Path(os.environ.get("OUTLAST_MEGATRON_LM", ""))
    assert turns_async_off(tree / "pretrain_gpt.py") is True
    text = (tree / "megatron" / "training" / "arguments.py").read_text()
    checks = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.If) and "async_save" in ast.dump(node.test)
    ]
    (check,) = [node for node in checks if "Disabling --async-save" in ast.unparse(node)][:1]
    args = argparse.Namespace(use_dist_ckpt=True, async_save=True, use_persistent_ckpt_worker=False)
    said: list[str] = []
    space = {"args": args, "warn_rank_0": lambda text, *_: said.append(text)}
    exec(compile(ast.Module(body=[check], type_ignores=[]), "arguments.py", "exec"), space)
    assert args.async_save is False and len(said) == 1, "asked for, and not done"


@pytest.mark.parametrize(("worker", "refused"), [(False, True), (True, False)])
def test_ours_refuses_it_by_name(worker: bool, refused: bool) -> None:
    params = {"async_save": True, "use_persistent_ckpt_worker": worker}
    run = settle(RunFile(name="a", task=Task(script="pretrain_gpt.py"), params=params, train_steps=9))
    told = [text for path, text in complain(run) if path == "$.params.async_save"]
    assert bool(told) is refused
    assert all("turns it off without a word" in text for text in told)
