"""The import rules of the house, held by reading every module's imports, those inside functions included.

    outlast.slurm, monitors, checkpoint  ->  reliability.model
    outlast.launchers                    ->  a few contracts of reliability, and the three above
    outlast.reliability                  ->  itself; app.py and cli/ alone compose the rooms

An exception stands in a table here with its reason; one that is not needed any more is an error too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import house_source as source
import pytest

# ---------------------------------------------------------------- which room may import what


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _ours(text: str) -> frozenset[str]:
    return frozenset(f"outlast.{name}" for name in text.split())


CONTRACTS = ("model", "wire", "frames", "runfile", "rundir", "ports")
"""What launchers may know of reliability."""

MAY_IMPORT = {
    "slurm": {"outlast.reliability.model"},
    "monitors": {"outlast.reliability.model"},
    "checkpoint": {"outlast.reliability.model"},
    "launchers": {f"outlast.reliability.{name}" for name in CONTRACTS},
    "reliability": set(),
}
MAY_IMPORT_ROOM = {"launchers": {"slurm", "checkpoint", "monitors"}}

EXCEPTIONS = {
    ("outlast.checkpoint.store", "outlast.reliability.ports"): "it is the real half of the CheckpointStore port",
    ("outlast.checkpoint.tiered", "outlast.reliability.ports"): "the same port, with nearer and farther tiers",
    ("outlast.checkpoint.errors", "outlast.reliability.ports"): "StoreError is a PortError to callers of the port",
    ("outlast.launchers.agent", "outlast.reliability.fence"): "an agent finds its supervisor's seat in epochs/",
    ("outlast.launchers.link", "outlast.reliability.fence"): "the link follows the highest epoch",
    ("outlast.launchers.election", "outlast.reliability.fence"): "a turn ends when a higher epoch is taken",
}

COMPOSERS = re.compile(r"outlast\.reliability\.(app|cli\..+)")
"""The composition root: it alone chooses real parts, so it may import every room."""

MODULES = {module.name: module for module in source.modules()}


def _wrong_imports(module: object) -> list[str]:
    name, room = module.name, module.room  # type: ignore[attr-defined]
    if COMPOSERS.fullmatch(name):
        return []
    found = []
    for imported in sorted(source.imports(name)):
        parts = imported.split(".")
        if parts[0] != "outlast" or len(parts) == 1 or parts[1] not in source.ROOMS:
            continue
        allowed = (
            parts[1] == room
            or parts[1] in MAY_IMPORT_ROOM.get(room, ())
            or imported in MAY_IMPORT[room]
            or (name, imported) in EXCEPTIONS
        )
        if not allowed:
            found.append(f"{name} imports {imported}")
    return found


def test_each_room_imports_only_what_it_may() -> None:
    wrong = [line for module in source.modules() for line in _wrong_imports(module)]
    assert not wrong, "\n".join(wrong)


def test_the_core_does_not_import_its_own_composition_root() -> None:
    """Else every part would drag in all the others. The front door is for processes, not for modules."""
    wrong = [
        f"{name} imports {imported}"
        for name in MODULES
        if not COMPOSERS.fullmatch(name)
        for imported in source.imports(name)
        if COMPOSERS.fullmatch(imported)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_exception_outlives_its_need() -> None:
    idle = [pair for pair in EXCEPTIONS if pair[1] not in source.imports(pair[0])]
    assert not idle, f"not needed any more: {idle}"


def test_the_rules_would_notice_a_broken_one() -> None:
    module = MODULES["outlast.slurm.drain"]
    broken = ast.parse(
        "def f():\n    from outlast.launchers import agent\n    from outlast.reliability.policy import judge\n"
    )
    seen = {imported for imported, _ in source.walk_imports(broken)}
    assert seen == {"outlast.launchers.agent", "outlast.reliability.policy"}
    assert not any(imported in MAY_IMPORT[module.room] for imported in seen)


# ---------------------------------------------------------------- pure modules

DOES_IO_OR_GUESSES = _words(
    """
    asyncio builtins ctypes fcntl getpass glob http importlib io logging mmap multiprocessing os platform pwd random
    resource secrets select selectors shutil signal socket subprocess sys tempfile threading time torch megatron numpy
    urllib uuid webbrowser
    """
)
FILE_CALLS = _words(
    """
    chmod exists glob is_dir is_file iterdir lstat mkdir read_bytes read_text rename resolve rglob rmdir stat
    symlink_to touch unlink write_bytes write_text
    """
)
CLOCK_CALLS = frozenset({"now", "today", "utcnow"})

MUST_BE_PURE = _ours(
    """
    reliability.attempt reliability.events reliability.evidence reliability.policy reliability.rules
    reliability.rules_operator reliability.rules_node reliability.rules_attempt reliability.decide reliability.driver
    reliability.runstate reliability.planning reliability.elastic reliability.goodput reliability.history
    reliability.frames reliability.runfile reliability.rundir monitors.hang monitors.xid_text monitors.rank_log
    slurm.commands slurm.drain slurm.hostlist slurm.parsers launchers.sbatch launchers.specs launchers.adapt
    launchers.trainer_order checkpoint.manifest
    """
)
DATA_ONLY = _ours("reliability.model reliability.verdict reliability.actions reliability.wire reliability.ports")


def _claims_to_be_pure(module: object) -> bool:
    doc = module.doc  # type: ignore[attr-defined]
    return bool(re.search(r"\bPure\b(?! but)", doc)) or module.name in DATA_ONLY  # type: ignore[attr-defined]


PURE = {name for name, module in MODULES.items() if _claims_to_be_pure(module)}


def test_the_deciding_modules_say_that_they_are_pure() -> None:
    assert not MUST_BE_PURE - PURE, f"without 'Pure' in the docstring: {sorted(MUST_BE_PURE - PURE)}"


@pytest.mark.parametrize("name", sorted(PURE))
def test_a_pure_module_imports_no_io_clock_or_chance(name: str) -> None:
    wrong = {imported for imported in source.imports(name) if imported.split(".")[0] in DOES_IO_OR_GUESSES}
    assert not wrong, f"{name} says that it is pure and imports {sorted(wrong)}"


@pytest.mark.parametrize("name", sorted(PURE))
def test_a_pure_module_opens_nothing_and_asks_no_clock(name: str) -> None:
    """pathlib and datetime are let in for paths and dates as values; what they do to the world is not."""
    wrong = []
    for node in ast.walk(MODULES[name].tree):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Name(id="open" | "print" | "input" | "exec" | "eval" as called):
                wrong.append(f"{called}() in line {node.lineno}")
            case ast.Attribute(attr=called) if called in FILE_CALLS | CLOCK_CALLS:
                wrong.append(f".{called}() in line {node.lineno}")
    assert not wrong, f"{name} says that it is pure: {wrong}"


DECIDING = _ours(
    """
    reliability.evidence reliability.policy reliability.rules reliability.rules_operator reliability.rules_node
    reliability.rules_attempt reliability.decide reliability.driver reliability.runstate reliability.planning
    """
)


def test_what_decides_rests_on_pure_modules_alone() -> None:
    """Not only their own imports: nothing that they reach may touch the world."""
    wrong = [
        f"{name} imports {imported}"
        for name in sorted(DECIDING)
        for imported in source.imports(name)
        if imported.startswith("outlast.") and imported not in PURE
    ]
    assert not wrong, "\n".join(wrong)


# ---------------------------------------------------------------- torch and megatron

HEAVY = frozenset({"torch", "megatron", "numpy"})
IN_RANKS = _ours(
    """
    checkpoint.writer checkpoint.reader checkpoint.megatron_plan checkpoint.image checkpoint.stager
    checkpoint.copying checkpoint.drafting checkpoint.group
    checkpoint.fingerprint checkpoint.placing checkpoint.live_prints checkpoint.raw_bits checkpoint.tensors
    checkpoint.dcp_reader checkpoint.filling checkpoint.megatron_load checkpoint.share checkpoint.planning
    checkpoint.dcp_plan checkpoint.dcp_sharing checkpoint.dcp_restore checkpoint.staged_prints checkpoint.model_prints
    checkpoint.comparing checkpoint.exporting checkpoint.snapshot_import launchers.megatron_cpu launchers.megatron_fixes
    launchers.trainer launchers.trainer_data launchers.trainer_model launchers.trainer_state launchers.trainer_tiers
    launchers.trainer_world
    """
)
"""Where torch may be imported: in ranks, in the process that ranks are forked from, and where tensors are read."""


def _is_heavy(imported: str) -> bool:
    return imported.split(".")[0] in HEAVY


def test_torch_and_megatron_stay_in_the_ranks() -> None:
    wrong = [
        f"{name} imports {imported}"
        for name in MODULES
        if name not in IN_RANKS and not name.startswith("outlast.launchers.megatron_lm")
        for imported in source.imports(name)
        if _is_heavy(imported)
    ]
    assert not wrong, "\n".join(wrong)


def _python(program: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _loads_torch(name: str, seen: set[str]) -> bool:
    """Whether importing this module imports torch, through modules that are imported at once (not lazily)."""
    if name in seen:
        return False
    seen.add(name)
    return any(
        _is_heavy(imported) or (imported in MODULES and _loads_torch(imported, seen))
        for imported in source.imports_at_once(name)
    )


LIGHT = _ours(
    """
    reliability.app reliability.cli.root reliability.cli.compose reliability.supervisor reliability.supervise
    launchers.agent launchers.warm launchers.rank launchers.recorder launchers.slurm_cluster launchers.local
    monitors.gate checkpoint.store checkpoint.engine slurm.client slurm.testbed
    """
)
"""What runs on head nodes, in agents and in hooks."""


def test_head_node_agent_and_hooks_never_load_torch() -> None:
    heavy = [name for name in sorted(LIGHT) if _loads_torch(name, set())]
    assert not heavy, f"these import torch: {heavy}"


@pytest.mark.slow
def test_everything_outside_the_ranks_runs_without_torch() -> None:
    """All of it, imported for real in one process."""
    light = [name for name in MODULES if not _loads_torch(name, set())]
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(*sorted({'torch', 'megatron', 'numpy'} & {name.split('.')[0] for name in sys.modules}))"
    )
    assert _python(program, *light).split() == []


def test_the_node_gate_is_the_standard_library_alone() -> None:
    """`outlast check` runs as a hook on every node every few minutes."""
    program = (
        "import sys; before = set(sys.modules)\n"
        "import outlast.reliability.app, outlast.monitors.gate\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    loaded = _python(program).split()
    strange = [name for name in loaded if name.split(".")[0] not in {*sys.stdlib_module_names, "outlast"}]
    assert not strange, strange
    ours = {name.removeprefix("outlast.") for name in loaded if name.startswith("outlast.") and name.count(".") == 2}
    assert ours == {"reliability.app", "monitors.gate", "monitors.gate_checks", "monitors.gate_child"}
    slow = {"asyncio", "subprocess", "socket", "json", "logging", "tomllib", "syslog"} & set(loaded)
    assert not slow, f"imported before they are needed: {slow}"


# ---------------------------------------------------------------- the shape of modules

MAX_LINES, MAX_FUNCTION_LINES = 400, 40

LONG_MODULES: dict[str, tuple[int, str]] = {}
LONG_FUNCTIONS = {
    "checkpoint/writer.py:save": (55, "the order of one save, and what undoes it"),
    "checkpoint/writer.py:__init__": (45, "the settings of a saver, each with its reason"),
}


def test_modules_are_short() -> None:
    long = []
    for module in source.modules():
        lines, limit = len(module.text.splitlines()), LONG_MODULES.get(module.short, (MAX_LINES, ""))[0]
        if lines > limit:
            long.append(f"{module.short}: {lines} lines, at most {limit}")
    assert not long, "\n".join(long)


def test_functions_are_short() -> None:
    long = []
    for module in source.modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                limit = LONG_FUNCTIONS.get(f"{module.short}:{node.name}", (MAX_FUNCTION_LINES, ""))[0]
                if lines > limit:
                    long.append(f"{module.short}:{node.lineno} {node.name}: {lines} lines, at most {limit}")
    assert not long, "\n".join(long)


def test_no_size_exception_outlives_its_need() -> None:
    lengths = {module.short: len(module.text.splitlines()) for module in source.modules()}
    functions = {
        f"{module.short}:{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for module in source.modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    idle = [name for name in LONG_MODULES if lengths.get(name, 0) <= MAX_LINES]
    idle += [name for name in LONG_FUNCTIONS if functions.get(name, 0) <= MAX_FUNCTION_LINES]
    assert not idle, f"not needed any more: {idle}"


def test_every_module_opens_with_what_it_does() -> None:
    silent = [module.short for module in source.modules() if len(module.doc) < 20]
    assert not silent, f"no docstring: {silent}"


def test_packages_import_nothing() -> None:
    full = [
        str(path) for room in source.ROOMS for path in (source.ROOT / room).rglob("__init__.py") if path.stat().st_size
    ]
    assert not full, f"not empty: {full}"
    tree = ast.parse((source.ROOT / "outlast" / "__init__.py").read_text(encoding="utf-8"))
    assert not list(source.walk_imports(tree))


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    """A script's own directory comes first on its path: a `queue.py` of ours would one day be someone's queue."""
    taken = [m.short for m in source.modules() if m.path.stem in sys.stdlib_module_names]
    assert not taken, taken


def test_imports_are_absolute_and_under_our_name() -> None:
    """A bare `import slurm` works in an editable install and would load a module twice."""
    wrong = [
        f"{name} imports {imported}"
        for name in MODULES
        for imported in source.imports(name)
        if imported.startswith(".") or imported.split(".")[0] in source.ROOMS
    ]
    assert not wrong, "\n".join(wrong)


def test_the_import_name_holds_links_to_the_five_rooms() -> None:
    for room in source.ROOMS:
        link = source.ROOT / "outlast" / room
        assert link.is_symlink() and link.resolve() == source.ROOT / room, f"{link} is no link to ../{room}"
