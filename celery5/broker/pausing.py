"""Pausing: which queues are paused for all workers of an application.

Floor: broker. Reads and writes: `celery5:{<app>}:paused`. Each trip is one command, and safe to repeat.
"""

from collections.abc import Iterable

from celery5.broker.call import Call
from celery5.broker.keys import Keys


def pause_queue(keys: Keys, queue: str) -> Call[bool]:
    """No worker is to read this queue; False when none was to before."""
    return Call(("SADD", keys.paused, queue), bool, repeatable=True)


def resume_queue(keys: Keys, queue: str) -> Call[bool]:
    """All may read it again; False when it was not paused."""
    return Call(("SREM", keys.paused, queue), bool, repeatable=True)


def list_paused_queues(keys: Keys) -> Call[set[str]]:
    """The queues that nobody is to read."""
    return Call(("SMEMBERS", keys.paused), _names, repeatable=True)


def _names(raw: Iterable[bytes]) -> set[str]:
    return {each.decode(errors="replace") for each in raw}
