"""The operations that there are: those of all modules of this package."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules

import celery5.operations
from celery5.operations.operation import Operation


def _collect_operations() -> Iterator[Operation]:
    """Yield the operations of each tuple whose name ends in OPERATIONS: who adds a module changes nothing here."""
    for module in iter_modules(celery5.operations.__path__, "celery5.operations."):
        if module.name != __name__:
            for name, value in vars(import_module(module.name)).items():
                if name.endswith("OPERATIONS"):
                    yield from value


OPERATIONS: Mapping[str, Operation] = {operation.name: operation for operation in _collect_operations()}
"""Every operation by name."""
