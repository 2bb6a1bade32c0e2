"""Import the names that a package offers when they are first used (PEP 562).

A producer that imports `celery5` to send one job loads only the modules for that.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def exports(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package.

    Args:
        package: The package's `__name__`.
        homes: The module that has each name, by name: `{"Range": "celery5.protocol.limits"}`.
    """

    def get(name: str) -> Any:
        if name not in homes:
            from celery5.hints import make_import_error

            raise make_import_error(name, package)
        return getattr(import_module(homes[name]), name)

    def names() -> list[str]:
        return sorted(homes)

    return get, names
