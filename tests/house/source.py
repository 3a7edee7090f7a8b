"""The project's own modules, read as syntax trees: what each imports, where, and how long things are.

Not a test. The tests beside it import it by path, since tests are no package.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("reliability", "monitors", "slurm", "launchers", "checkpoint")


@dataclass(frozen=True)
class Module:
    name: str
    """As it is imported: `outlast.slurm.drain`."""
    path: Path
    tree: ast.Module
    text: str

    @property
    def room(self) -> str:
        return self.name.split(".")[1]

    @property
    def doc(self) -> str:
        return ast.get_docstring(self.tree) or ""

    @property
    def short(self) -> str:
        """`slurm/drain.py`."""
        return str(self.path.relative_to(ROOT))


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the five rooms, `__init__.py` left out."""
    found = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if path.name != "__init__.py" and "__pycache__" not in path.parts:
                name = ".".join(("outlast", *path.relative_to(ROOT).with_suffix("").parts))
                text = path.read_text(encoding="utf-8")
                found.append(Module(name, path, ast.parse(text), text))
    return tuple(found)


@cache
def names() -> frozenset[str]:
    return frozenset(module.name for module in modules())


@cache
def imports(name: str) -> frozenset[str]:
    """Everything that a module imports: lazily inside functions and for type checking too."""
    module = next(m for m in modules() if m.name == name)
    return frozenset(imported for imported, _ in walk_imports(module.tree))


@cache
def imports_at_once(name: str) -> frozenset[str]:
    """What importing the module imports: not what stands inside functions, not what is for type checking alone."""
    module = next(m for m in modules() if m.name == name)
    top = ast.Module(body=[node for node in module.tree.body if not _is_definition(node)], type_ignores=[])
    return frozenset(imported for imported, typing_only in walk_imports(top) if not typing_only)


def _is_definition(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def walk_imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """(module, for type checking alone). `from outlast.slurm import drain` is outlast.slurm.drain."""
    typed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in typed) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield (whole if whole in names() else base), id(node) in typed
