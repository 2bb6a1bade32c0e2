"""Walk workflows that are nested deeply: what walks them calls itself, and Python allows a thousand such calls.

Such a function uses list comprehensions, neither `map` nor a generator: those call it from C, and Python 3.12 allows
only some hundred calls from C inside each other, whatever limit is set.
"""

import sys
from collections.abc import Callable
from typing import TypeVar

from celery5.errors import Misconfigured

T = TypeVar("T")

MAX_NESTING = 1_000
"""Groups and chains inside each other."""
_ROOM = 20 * MAX_NESTING
"""Calls inside each other that this takes, with room to spare. Since 3.11 they do not use the stack of the thread."""


def walk_deeply(walk: Callable[[], T]) -> T:
    """Return what a function without side effects returns, however deeply it calls itself.

    When it fails for that, the limit of this process is raised for good: lowering it again would break other threads.

    Raises:
        Misconfigured: What it walks is nested more deeply than MAX_NESTING.
    """
    try:
        return walk()
    except RecursionError:
        pass
    sys.setrecursionlimit(max(sys.getrecursionlimit(), _ROOM))
    try:
        return walk()
    except RecursionError:
        raise Misconfigured(
            f"a workflow is nested too deeply: at most {MAX_NESTING} groups and chains inside each other"
        ) from None
