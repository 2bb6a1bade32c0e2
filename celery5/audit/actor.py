"""Say who acts, and from where: by default the user of this process, from Python."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from celery5.protocol.audit import AuditSource


class Actor(NamedTuple):
    """Who acts. `who` is '' for the user of this process."""

    who: str = ""
    source: "AuditSource" = "python"


_ACTOR: ContextVar[Actor] = ContextVar("celery5_actor", default=Actor())  # noqa: B039  it is immutable


@contextmanager
def acting(who: str, source: "AuditSource") -> Generator[None, None, None]:
    """Record the actions within this block as those of `who`, '' for the user of this process."""
    token = _ACTOR.set(Actor(who, source))
    try:
        yield
    finally:
        _ACTOR.reset(token)


def get_actor() -> Actor:
    """Return who acts now."""
    return _ACTOR.get()


def get_actor_name() -> str:
    """Return the name of who acts now: the one that was given, else user and host."""
    return _ACTOR.get().who or get_user()


@cache
def get_user() -> str:
    """Return the user of this process, and the host."""
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
