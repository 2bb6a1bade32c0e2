"""Wiring: builds a process out of its parts, by the names of their constructors' parameters.

Besides the process pages this is the only place that knows the injector; the parts never know that they are injected.
"""

from typing import Any, TypeVar, cast

from dependencies import Injector

T = TypeVar("T")


def build(root: type[T], parts: Injector, /, **given: object) -> T:
    """One `root` with everything its constructor asks for, directly or not: from `parts`, where `given` wins.

    Asked for once, so that every part in it exists once.
    """
    return cast("T", cast("Any", parts(root=root, **given)).root)
