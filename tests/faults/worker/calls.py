"""Calls: small commands for fault tests, and a way to wait for a condition."""

from collections.abc import Callable
from typing import Any

import trio

from celery5.broker.call import Call
from tests.pace import Pace


def raw(*words: str | bytes | float, repeatable: bool = False, blocks: float = 0.0) -> Call[Any]:
    """A command whose reply is taken as it is."""
    return Call(words, lambda reply: reply, repeatable=repeatable, blocks=blocks)


def get(key: str) -> Call[bytes | None]:
    """A read, which may be sent again."""
    return raw("GET", key, repeatable=True)


def incr(key: str, *, repeatable: bool = False) -> Call[int]:
    """A command that counts how often it ran."""
    return raw("INCR", key, repeatable=repeatable)


async def until(condition: Callable[[], bool], *, within: float = 30.0) -> None:
    """Wait until something is true, looking again every few milliseconds."""
    pace = Pace()
    with trio.fail_after(within):
        while not pace.look(condition):
            await trio.sleep(pace.pause)
