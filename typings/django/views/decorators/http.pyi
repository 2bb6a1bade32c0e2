# Django: as much of its interface as celery5 and its tests use; the library has no type information of its own.

from collections.abc import Callable
from typing import TypeVar

_F = TypeVar("_F", bound=Callable[..., object])

def require_POST(function: _F, /) -> _F: ...
