"""Every test asserts something: itself, or through a helper of its own folder that does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
FILES = [path for path in sorted(TESTS.rglob("test_*.py")) if "data" not in path.parts]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def _functions(path: Path) -> tuple[Function, ...]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tuple(node for node in ast.walk(tree) if isinstance(node, Function))


def _asserts(function: Function, helpers: frozenset[str]) -> bool:
    return any(isinstance(node, ast.Assert) or _called(node) & helpers for node in ast.walk(function))


def _called(node: ast.AST) -> set[str]:
    match node:
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return {name}
    return set()


@cache
def _helpers(folder: Path) -> frozenset[str]:
    """Names of what asserts when it is called: pytest's own, then functions of the folder's files."""
    found = frozenset({"raises", "warns", "fail"})
    functions = [f for path in sorted(folder.glob("*.py")) for f in _functions(path) if not f.name.startswith("test_")]
    while True:
        more = found | {function.name for function in functions if _asserts(function, found)}
        if more == found:
            return found
        found = more


def _silent(path: Path) -> Iterator[str]:
    for function in _functions(path):
        if function.name.startswith("test_") and not _asserts(function, _helpers(path.parent)):
            yield f"{path.relative_to(TESTS.parent)}:{function.lineno} {function.name}"


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda folder: folder.name)
def test_every_test_asserts_something(folder: Path) -> None:
    silent = [line for path in FILES if path.parent == folder for line in _silent(path)]
    assert not silent, "these cannot turn red but by an exception:\n" + "\n".join(silent)


def test_a_silent_test_would_be_noticed() -> None:
    silent, loud, through = ast.parse(
        "def test_a(): parse(b'')\n"
        "def test_b():\n    with pytest.raises(ValueError): parse(b'')\n"
        "def test_c(): check_laws(run())\n"
    ).body
    assert isinstance(silent, Function) and isinstance(loud, Function) and isinstance(through, Function)
    helpers = frozenset({"raises", "check_laws"})
    assert [_asserts(function, helpers) for function in (silent, loud, through)] == [False, True, True]
