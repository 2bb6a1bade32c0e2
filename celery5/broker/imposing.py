"""Imposing: the trips that impose a limit on a task, suspend it, take that back, and tell what is imposed.

Floor: broker. Reads and writes: `celery5:{<app>}:limits` and `celery5:{<app>}:suspended`. Each trip is safe to repeat.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from celery5.broker.call import Call, Script, scripted
from celery5.broker.keys import Keys
from celery5.protocol.limits import Imposed, Suspension

IMPOSE = Script.load("impose")
IMPOSED = Script.load("imposed")

T = TypeVar("T", Imposed, Suspension)


class Impositions(msgspec.Struct, frozen=True):
    """What is imposed on the tasks of an application, by their names: `limits` (and rates), and who is `suspended`."""

    limits: dict[str, Imposed]
    suspended: dict[str, Suspension]


def impose(keys: Keys, task: str, what: Imposed | None) -> Call[bool]:
    """Impose a limit or a rate on a task in place of what was imposed before; None takes it back. Gives whether that
    changes anything."""
    words = b"" if what is None else msgspec.json.encode(what)
    return scripted(IMPOSE, (keys.limits,), (keys.limits, task, words, ""), bool, repeatable=True)


def suspend(keys: Keys, task: str, what: Suspension) -> Call[bool]:
    """Suspend a task, or give another reason for it."""
    words = msgspec.json.encode(what)
    return scripted(IMPOSE, (keys.suspended,), (keys.limits, task, words, ""), bool, repeatable=True)


def suspend_instead(keys: Keys, task: str, what: Suspension, before: Suspension | None) -> Call[bool]:
    """Suspend a task that is as it was `before`; None: not suspended. Gives whether that changes anything."""
    words, only = msgspec.json.encode(what), b"-" if before is None else msgspec.json.encode(before)
    return scripted(IMPOSE, (keys.suspended,), (keys.limits, task, words, only), bool, repeatable=True)


def resume(keys: Keys, task: str, only: Suspension | None = None) -> Call[bool]:
    """Let a task's jobs run again; with `only`, unless it is suspended in another way by now. Gives whether that
    changes anything."""
    words = b"" if only is None else msgspec.json.encode(only)
    return scripted(IMPOSE, (keys.suspended,), (keys.limits, task, "", words), bool, repeatable=True)


def imposed(keys: Keys) -> Call[Impositions]:
    """What is imposed now. What cannot be read is passed over: a newer version may have written it."""
    return scripted(IMPOSED, (keys.limits, keys.suspended), (), _impositions, repeatable=True)


def _impositions(raw: Sequence[Any]) -> Impositions:
    return Impositions(_read(raw[0], Imposed), _read(raw[1], Suspension))


def _read(words: Sequence[bytes], kind: type[T]) -> dict[str, T]:
    found: dict[str, T] = {}
    for task, what in zip(words[::2], words[1::2], strict=True):
        try:
            found[task.decode(errors="replace")] = msgspec.json.decode(what, type=kind)
        except msgspec.DecodeError:
            continue
    return found
