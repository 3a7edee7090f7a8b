"""Call a function right after a named module has been executed, without touching its file.

For adapters to programs that are run unmodified: `after_import("megatron.training.training", wrap)` makes `wrap`
see the module object before its importer does. Where the module is loaded already, the call is made at once.
It is not a patching library: what the function changes, and whether the names are still there, is its business.
Standard library alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Hook = Callable[[ModuleType], None]


def after_import(name: str, hook: Hook) -> None:
    """Run hook(module) once, right after `name` was executed; an error of the hook is the import's error."""
    loaded = sys.modules.get(name)
    if loaded is not None and not _is_loading(loaded):
        hook(loaded)
        return
    _finder().hooks.setdefault(name, []).append(hook)


def pending() -> tuple[str, ...]:
    """Modules that are waited for and have not been imported: what an adapter names when a program lacks them."""
    return tuple(sorted(_finder().hooks))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.hooks: dict[str, list[Hook]] = {}
        self._looking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders give, with a loader that calls the hooks; None for all other modules."""
        if fullname not in self.hooks or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader, finder: _Finder) -> None:
        self._inner, self._finder = inner, finder

    def __getattr__(self, name: str) -> object:
        # get_source, get_data, is_package ...: runpy, inspect and pkgutil ask the module's loader for them
        return getattr(self._inner, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute it, then give the module its own loader back and call the hooks."""
        self._inner.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        for hook in self._finder.hooks.pop(module.__name__, []):
            hook(module)


def _is_loading(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def _finder() -> _Finder:
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            return finder
    made = _Finder()
    sys.meta_path.insert(0, made)
    return made
