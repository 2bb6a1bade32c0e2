"""Succession: what a platform may do beside what each must: process ids, and successors (C91).

Floor: services. Reads: nothing. Writes: nothing.

`celery5.platform` tells what these are. A platform without one of them has nothing to do then.
"""

from collections.abc import Callable

from celery5.platform import Platform


def outlives(platform: Platform, name: str) -> bool:
    """Whether this member goes on without the Controller that has started it."""
    tells: Callable[[str], bool] | None = getattr(platform, "outlives", None)
    return tells is not None and tells(name)


def pid_of(platform: Platform, name: str) -> int | None:
    """Return the process id of a member, on the host that it runs on; None when it is not known."""
    tells: Callable[[str], int | None] | None = getattr(platform, "pid_of", None)
    return None if tells is None else tells(name)


def set_fence(platform: Platform, may_act: Callable[[], bool]) -> None:
    """What it does later than it was asked, it does only when this Controller still `may`."""
    fences: Callable[[Callable[[], bool]], None] | None = getattr(platform, "fence", None)
    if fences is not None:
        fences(may_act)


def release_members(platform: Platform) -> None:
    """Another Controller looks after its members from now on."""
    leaves: Callable[[], None] | None = getattr(platform, "leave", None)
    if leaves is not None:
        leaves()
