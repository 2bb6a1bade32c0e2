# Dependencies: as much of its interface as celery5 uses; the library has no type information of its own.
#
# Calling an injector gives another injector and no instance; what a checker has to know is that it takes any names.
# A `value` becomes, on what is built, whatever its function returns.

from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

class Injector:
    def __init__(self, **scope: object) -> None: ...
    def __call__(self, **scope: object) -> Injector: ...

def value(function: Callable[..., _T]) -> _T: ...
