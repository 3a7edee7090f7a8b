"""How each kind of program is told its layout, where to save and from where to restore. Pure.

Three kinds: the reference trainer, Megatron-LM's own scripts (flags only: no file of theirs is touched), and plain
programs, to which nothing is added. What outlast gives must not be contradicted by parameters; `complain` says so
before anything is started.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path, PurePath
from typing import Final, Protocol

import msgspec

from outlast.launchers.trainer_args import Settings, why_not
from outlast.reliability.model import Layout, Plan
from outlast.reliability.ports import Launcher
from outlast.reliability.runfile import LayoutAsked, RunFile

TRAINER: Final = "outlast.launchers.trainer"
_MEGATRON_SCRIPT: Final = re.compile(r"pretrain_(gpt|bert|t5|mamba|hybrid|retro|vlm|ict|vision_\w+)\.py")
_AUTO_STEPS: Final = {"reference": 50, "megatron_lm": 500}
"""`checkpoint.every: auto` for programs that save by train_steps, until their step time is known."""
_AUTO_S: Final = 1800.0
_BIGGEST_BATCH: Final = 1_000_000
"""The planner tries all divisors of a global batch."""

Value = str | int | float | bool | None


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """One flag that outlast gives: a parameter of this name may only say the same."""

    name: str
    value: Value
    by: str
    """The setting of RUN.yaml that holds it."""


class Kind(Launcher, Protocol):
    """A Launcher with what is checked before a run is frozen."""

    def complain(self, run: RunFile) -> Iterator[tuple[str, str]]: ...


def kind_of(run: RunFile) -> str:
    """reference | megatron_lm | plain: what `auto` stands for, by the program's name."""
    task = run.task
    if task.kind != "auto":
        return task.kind
    if task.module == TRAINER:
        return "reference"
    return "megatron_lm" if _MEGATRON_SCRIPT.fullmatch(PurePath(task.script).name) else "plain"


def for_run(run: RunFile) -> Kind:
    """The adapter of this run's kind."""
    kinds: Mapping[str, type[Reference] | type[MegatronLm] | type[Plain]]
    kinds = {"reference": Reference, "megatron_lm": MegatronLm, "plain": Plain}
    return kinds[kind_of(run)]()


def settle(run: RunFile) -> RunFile:
    """The same with every `auto` replaced by what is used, so that the frozen run says it."""
    kind, every = kind_of(run), run.checkpoint
    steps = run.train_steps
    if kind == "megatron_lm":
        params = _counts(run.params)
        if not every.every_steps and not every.every_s:
            every = msgspec.structs.replace(every, every_steps=params.get("save_interval", 0))
        steps = steps or params.get("train_iters", 0)
    if not every.every_steps and not every.every_s:
        auto = {"every_steps": _AUTO_STEPS[kind], "auto": True} if kind in _AUTO_STEPS else {"every_s": _AUTO_S}
        every = msgspec.structs.replace(every, **auto)
    task = msgspec.structs.replace(run.task, kind=kind)
    layout = _any_dp(run) if kind == "plain" else run.layout
    return msgspec.structs.replace(run, task=task, checkpoint=every, train_steps=steps, layout=layout)


def _any_dp(run: RunFile) -> LayoutAsked:
    """A plain program is not told of a global batch; it must not keep nodes out of the layout."""
    asked, each = run.layout, run.ranks_per_node
    replica = asked.tp * asked.pp * asked.cp
    sizes = {nodes * each // replica for nodes in range(run.nodes_min, run.cluster.nodes + 1)} - {0}
    if all(asked.global_batch % (asked.micro_batch * dp) == 0 for dp in sizes):
        return asked
    common = math.lcm(*sizes)
    widest = max(sizes) if common > _BIGGEST_BATCH else common
    return msgspec.structs.replace(asked, global_batch=asked.micro_batch * widest)


def complain(run: RunFile) -> tuple[tuple[str, str], ...]:
    """(path, what is wrong): parameters that contradict, a layout that the program cannot take."""
    return tuple(for_run(run).complain(run))


def as_flags(params: Mapping[str, Value]) -> tuple[str, ...]:
    """`lr: 3e-3` -> `--lr 0.003`; true is a bare flag; false and null leave it out."""
    words: list[str] = []
    for name, value in params.items():
        flag = "--" + name.replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            words.append(flag)
        elif isinstance(value, str) and value.startswith("-"):
            words.append(f"{flag}={value}")  # else argparse takes it for a flag
        else:
            words += [flag, str(value)]
    return tuple(words)


def _command(run: RunFile, given: Mapping[str, Value]) -> tuple[str, ...]:
    """The program, what outlast gives, the parameters that it does not give, and the words at the end."""
    task = run.task
    program = task.command or (task.script or task.module,)
    rest = {name: value for name, value in run.params.items() if name.replace("-", "_") not in given}
    return (*program, *as_flags(given), *as_flags(rest), *task.args)


def _restore_env(plan: Plan) -> dict[str, str]:
    if not plan.restore_step:
        return {}
    return {"OUTLAST_RESTORE_DIR": plan.restore_path, "OUTLAST_RESTORE_STEP": str(plan.restore_step)}


def _asked_layout(run: RunFile) -> Layout:
    asked = run.layout
    dp = run.cluster.nodes * run.ranks_per_node // (asked.tp * asked.pp * asked.cp)
    return Layout(tp=asked.tp, pp=asked.pp, cp=asked.cp, ep=asked.ep, dp=dp)


def _contradictions(run: RunFile, given: tuple[Given, ...]) -> Iterator[tuple[str, str]]:
    by_name = {one.name: one for one in given}
    for name, value in run.params.items():
        one = by_name.get(name.replace("-", "_"))
        if one is not None and value is not None and value != one.value:
            shown = "false" if value is False else value
            text = f"found {shown}, but {one.by} says {one.value}; leave it out, outlast gives it to the program"
            yield f"$.params.{name}", text


def _saves_by_steps(run: RunFile, program: str) -> Iterator[tuple[str, str]]:
    if run.checkpoint.every_s:
        text = f"{program} saves by train_steps, not by time; expected for example '500 steps'"
        yield "$.checkpoint.every_s", text


def _no_local(run: RunFile, program: str) -> Iterator[tuple[str, str]]:
    if run.tiers.local_dir:
        text = f"{program} cannot save to its nodes yet, only the reference trainer can; expected none"
        yield "$.tiers.local_dir", text


def _illegal(kind: Launcher, run: RunFile) -> Iterator[tuple[str, str]]:
    why = kind.legal(run, _asked_layout(run))
    if why:
        yield "$.layout", why


class Plain:
    """Any program. It knows nothing of outlast; a restore is offered in its environment."""

    def argv(self, run: RunFile, plan: Plan) -> tuple[str, ...]:
        return _command(run, {})

    def env(self, run: RunFile, plan: Plan) -> dict[str, str]:
        return {**run.task.env, **_restore_env(plan)}

    def preload(self, run: RunFile) -> tuple[str, ...]:
        return run.task.preload or (() if run.task.command else ("torch",))

    def legal(self, run: RunFile, layout: Layout) -> str:
        return ""

    def complain(self, run: RunFile) -> Iterator[tuple[str, str]]:
        yield from _no_local(run, "a plain program")


class Reference:
    """outlast's own trainer: its flags bear the names of RUN.yaml's settings."""

    def argv(self, run: RunFile, plan: Plan) -> tuple[str, ...]:
        given = {one.name: one.value for one in self._given(run, plan.layout, plan.micro_batch)}
        given["restore_dir"] = plan.restore_path if plan.restore_step else None
        given["save_every"] = plan.save_every or given["save_every"]
        if "data_dir" not in run.params:
            given["data_dir"] = str(PurePath(run.run_root) / "reference-data")  # built once for all runs
        return _command(run, given)

    def env(self, run: RunFile, plan: Plan) -> dict[str, str]:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **run.task.env, **_restore_env(plan)}

    def preload(self, run: RunFile) -> tuple[str, ...]:
        return run.task.preload or (TRAINER,)

    def legal(self, run: RunFile, layout: Layout) -> str:
        known = {field.name: field.type for field in fields(Settings)}
        given = {one.name: one.value for one in self._given(run, layout, run.layout.micro_batch)}
        chosen = {name: value for name, value in {**run.params, **given}.items() if name in known and value is not None}
        paths = {name: Path(str(value)) for name, value in chosen.items() if "Path" in str(known[name])}
        settings = Settings(**{"data_dir": Path(), **chosen, **paths})  # type: ignore[arg-type]
        return why_not(settings, layout.world_size)

    def complain(self, run: RunFile) -> Iterator[tuple[str, str]]:
        if not run.train_steps:
            yield (
                "$.train_steps",
                "missing; expected the train_step to end at: the reference trainer has no end of its own",
            )
        yield from _saves_by_steps(run, "the reference trainer")
        wrong = [
            *self._unknown(run),
            *_contradictions(run, self._given(run, _asked_layout(run), run.layout.micro_batch)),
        ]
        yield from wrong or _illegal(self, run)

    def _unknown(self, run: RunFile) -> Iterator[tuple[str, str]]:
        known = {field.name: str(field.type) for field in fields(Settings)}
        for name, value in run.params.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1, 0.6)
                hint = f"; did you mean {near[0]}?" if near else f"; expected one of {', '.join(known)}"
                yield f"$.params.{name}", f"the reference trainer has no such parameter{hint}"
            elif not _fits(known[name], value):
                yield f"$.params.{name}", f"found {value!r}, expected {known[name].split(' ')[0]}"

    def _given(self, run: RunFile, layout: Layout, micro_batch: int) -> tuple[Given, ...]:
        return (
            Given(name="tp", value=layout.tp, by="layout.tp"),
            Given(name="pp", value=layout.pp, by="layout.pp"),
            Given(name="cp", value=layout.cp, by="layout.cp"),
            Given(name="ep", value=layout.ep, by="layout.ep"),
            Given(name="train_steps", value=run.train_steps or None, by="train_steps"),
            Given(name="global_batch", value=run.layout.global_batch, by="layout.global_batch"),
            Given(name="micro_batch", value=micro_batch, by="layout.micro_batch"),
            Given(name="save_every", value=run.checkpoint.every_steps or None, by="checkpoint.every"),
            Given(name="save_follows", value=run.checkpoint.auto or None, by="checkpoint.every"),
            Given(name="checkpoint_dir", value=run.checkpoint.dir or "checkpoints", by="checkpoint.dir"),
            Given(name="local_dir", value=run.tiers.local_dir or None, by="tiers.local_dir"),
            Given(name="local_every", value=run.tiers.local_every_steps or None, by="tiers.local_every_steps"),
            Given(name="restore_dir", value=None, by="outlast (it chooses the checkpoint that verifies)"),
        )


def _fits(kind: str, value: Value) -> bool:
    """Whether a parameter's value is of the field's type; null leaves it out."""
    if value is None:
        return True
    if kind == "bool":
        return isinstance(value, bool)
    if kind in ("int", "float"):
        numbers = (int,) if kind == "int" else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool)
    return isinstance(value, str)


class MegatronLm:
    """Megatron-LM's pretrain scripts, core_v0.14 and later, unmodified."""

    def argv(self, run: RunFile, plan: Plan) -> tuple[str, ...]:
        given = {one.name: one.value for one in self._given(run, plan.layout, plan.micro_batch)}
        given["save_interval"] = plan.save_every or given["save_interval"]
        if plan.restore_step:
            given |= {
                "load": str(PurePath(plan.restore_path).parent),
                "ckpt_step": plan.restore_step,
                # a checkpoint that is gone must end the attempt, not begin the training anew
                "exit_on_missing_checkpoint": True,
                # these belong to the start from somebody's weights, never to going on with one's own
                **dict.fromkeys(("finetune", "no_load_optim", "no_load_rng", "pretrained_checkpoint"), None),
            }
        return _command(run, given)

    def env(self, run: RunFile, plan: Plan) -> dict[str, str]:
        # Megatron-LM asserts the first one where tp or cp is above 1
        ours = {"OUTLAST_ADAPTER": "outlast.launchers.megatron_lm", **_restore_env(plan)}
        if not run.cluster.gpus_per_node:
            ours["OUTLAST_MEGATRON_CPU"] = "1"
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **run.task.env, **ours}

    def preload(self, run: RunFile) -> tuple[str, ...]:
        # not megatron itself: the script's own directory comes first on its path, and its megatron with it
        own = () if run.cluster.gpus_per_node else ("outlast.launchers.megatron_lm_warm",)
        return run.task.preload or ("torch", *own)

    def legal(self, run: RunFile, layout: Layout) -> str:
        return next(_megatron_objections(run, layout), "")

    def complain(self, run: RunFile) -> Iterator[tuple[str, str]]:
        yield from _saves_by_steps(run, "Megatron-LM")
        yield from _no_local(run, "Megatron-LM")
        if run.task.command:
            text = "a command's steps cannot be seen; expected task.script, which is run by the same Python"
            yield "$.task.command", text
        params = {name.replace("-", "_"): value for name, value in run.params.items()}
        if params.get("async_save") and not params.get("use_persistent_ckpt_worker"):
            text = "Megatron-LM turns it off without a word where use_persistent_ckpt_worker is not given too"
            yield "$.params.async_save", f"{text}; give both or neither"
        yield from _contradictions(run, self._given(run, _asked_layout(run), run.layout.micro_batch))
        yield from _illegal(self, run)

    def _given(self, run: RunFile, layout: Layout, micro_batch: int) -> tuple[Given, ...]:
        own_optimizer = run.params.get("use_distributed_optimizer") is not False
        sizes = (
            Given(name="tensor_model_parallel_size", value=layout.tp, by="layout.tp"),
            Given(name="pipeline_model_parallel_size", value=layout.pp, by="layout.pp"),
            Given(name="context_parallel_size", value=layout.cp, by="layout.cp"),
            Given(name="expert_model_parallel_size", value=layout.ep, by="layout.ep"),
            Given(name="global_batch_size", value=run.layout.global_batch, by="layout.global_batch"),
            Given(name="micro_batch_size", value=micro_batch, by="layout.micro_batch"),
        )
        saving = (
            Given(name="save", value=run.checkpoint.dir or "checkpoints", by="checkpoint.dir"),
            Given(name="save_interval", value=run.checkpoint.every_steps or None, by="checkpoint.every"),
            Given(name="ckpt_format", value="torch_dist", by="outlast (it verifies this format)"),
            Given(name="exit_signal_handler", value=True, by="outlast (it asks for a save with SIGTERM)"),
        )
        optimizer = (
            Given(name="use_distributed_optimizer", value=True, by="outlast (it restores into other layouts)"),
            Given(name="dist_ckpt_optim_fully_reshardable", value=True, by="outlast (it restores into other layouts)"),
        )
        end = (Given(name="train_iters", value=run.train_steps, by="train_steps"),) if run.train_steps else ()
        gloo = Given(name="distributed_backend", value="gloo", by="cluster.gpus_per_node (0: ranks use the CPU)")
        backend = () if run.cluster.gpus_per_node else (gloo,)
        return (*sizes, *saving, *(optimizer if own_optimizer else ()), *end, *backend)


def _counts(params: Mapping[str, Value]) -> dict[str, int]:
    return {name.replace("-", "_"): value for name, value in params.items() if isinstance(value, int) and value > 0}


def _megatron_objections(run: RunFile, layout: Layout) -> Iterator[str]:
    """Why Megatron-LM would refuse this layout, from the parameters that are known."""
    size = _counts(run.params)
    heads, groups = size.get("num_attention_heads"), size.get("num_query_groups")
    layers, experts, length = size.get("num_layers"), size.get("num_experts"), size.get("seq_length")
    uneven = any("pipeline_num_layers" in name or "pipeline_model_parallel_layout" in name for name in run.params)
    checks = (
        (heads, layout.tp, f"{heads} attention heads do not divide over tp {layout.tp}"),
        (
            groups if groups and groups > layout.tp else None,
            layout.tp,
            f"{groups} query groups do not divide over tp {layout.tp}",
        ),
        (None if uneven else layers, layout.pp, f"{layers} layers do not divide over pp {layout.pp}"),
        (experts, layout.ep, f"{experts} experts do not divide over ep {layout.ep}"),
        (
            length if layout.cp > 1 else None,
            2 * layout.cp,
            f"seq_length {length} does not divide by 2 x cp {layout.cp}",
        ),
    )
    yield from (text for number, by, text in checks if number is not None and number % by)
    if layout.ep > 1 and not experts:
        yield f"ep {layout.ep} without experts: give the parameter num_experts"
    if (layout.dp * layout.cp) % layout.ep:
        yield f"ep {layout.ep} does not divide dp x cp = {layout.dp * layout.cp}"
    part = run.layout.micro_batch * layout.dp
    if run.layout.global_batch % part:
        yield (
            f"global_batch {run.layout.global_batch} is no multiple of micro_batch {run.layout.micro_batch} x dp "
            f"{layout.dp} = {part}; expected for example {max(part, run.layout.global_batch // part * part)}"
        )
