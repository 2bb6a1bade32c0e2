"""Presence: the trips that tell that a process without jobs, a Scheduler say, lives, and ask which do.

Floor: broker. Reads and writes: what `renew_presence.lua` says; all keys come from `keys.py`.
"""

from collections.abc import Iterable

from celery5.broker.call import Call, Script, script_call
from celery5.broker.keys import Keys

RENEW_PRESENCE = Script.load("cluster/renew_presence")


def renew_presence(keys: Keys, kind: str, name: str, *, lease: float) -> Call[tuple[str, ...]]:
    """The process `name` lives, for so many seconds; gives all of its kind that do."""
    return script_call(
        RENEW_PRESENCE, (keys.live_processes(kind),), (name, int(lease * 1000)), _names, repeatable=True
    )


def end_presence(keys: Keys, kind: str, name: str) -> Call[tuple[str, ...]]:
    """The process `name` has ended; gives those of its kind that live."""
    return script_call(RENEW_PRESENCE, (keys.live_processes(kind),), (name, 0), _names, repeatable=True)


def list_live_processes(keys: Keys, kind: str) -> Call[tuple[str, ...]]:
    """The processes of a kind that live."""
    return end_presence(keys, kind, "")


def claim_recycling(keys: Keys, worker: str, *, seconds: float) -> Call[bool]:
    """`worker` goes now, to begin anew, unless another one has done so in the last `seconds`; gives whether it may."""
    ms = int(seconds * 1000)
    return Call(("SET", keys.recycling, worker, "NX", "PX", ms), bool, repeatable=True)


def _names(raw: Iterable[bytes]) -> tuple[str, ...]:
    return tuple(each.decode(errors="replace") for each in raw)
