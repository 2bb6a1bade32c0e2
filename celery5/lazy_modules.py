"""Import what a process needs, and no more: modules load at their first use, and no garbage is collected meanwhile.

A worker imports every page and every call that it might need, and most workers need few of them. A package lists its
lazy modules: `load_lazily(__name__, "streams", "workflows")` in its `__init__`. Then
`from celery5.broker.calls import streams` costs next to nothing until somebody asks for an attribute of `streams`;
`from celery5.broker.calls.streams import RawEntry` loads it at once, as usual. Importers and type checkers see usual
imports.

`importlib.util.LazyLoader` does the same, but before Python 3.12 a second thread sees a module that is half loaded.
"""

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec
from threading import RLock
from types import ModuleType
from typing import Any, cast


class LazyModule(ModuleType):
    """A module that was imported and is not loaded yet. Once it is, it is a plain module."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":  # `vars(module)` has all of its names, too
            _load(self)
        return ModuleType.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        # What looks at all modules, as `warnings` and `inspect` do, loads none.
        if not name.startswith("__"):
            _load(self)
        return ModuleType.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Loading it later would undo this.
        if not name.startswith("__"):
            _load(self)
        ModuleType.__setattr__(self, name, value)

    def __dir__(self) -> list[str]:
        _load(self)
        return sorted(self.__dict__)


_LOCKS: dict[str, RLock] = {}
"""A lock for each lazy module, by its name. No imports are circular, so no two threads can wait for each other."""
_LOADING: set[str] = set()


def load_lazily(package: str, *names: str) -> None:
    """Have these modules of a package loaded when they are first used. Call it in the package's `__init__`."""
    for name in names:
        full_name = f"{package}.{name}"
        spec = find_spec(full_name)
        if spec is None:
            raise ModuleNotFoundError(f"no module {full_name}", name=full_name)
        module = module_from_spec(spec)
        module.__class__ = LazyModule
        _LOCKS[full_name] = RLock()
        sys.modules[full_name] = module
        setattr(sys.modules[package], name, module)


def _load(module: Any) -> None:
    name = module.__name__
    with _LOCKS[name]:
        # Another thread has loaded it, or this one is about to: its imports lead back to it.
        if type(module) is not LazyModule or name in _LOADING:
            return
        _LOADING.add(name)
        try:
            spec = module.__spec__
            assert spec is not None
            assert spec.loader is not None
            spec.loader.exec_module(module)
            module.__class__ = cast("Any", ModuleType)
        finally:
            _LOADING.remove(name)


@contextmanager
def without_garbage_collection() -> Generator[None, None, None]:
    """Collect no garbage while modules are imported, and spare what exists by then from later collections: it stays.

    The collections would take a tenth of a worker's start, and find nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
