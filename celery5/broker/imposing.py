"""Imposing: the trips that impose a limit on a task, suspend it, take that back, and tell what is imposed.

Floor: broker. Reads and writes: `celery5:{<app>}:limits` and `celery5:{<app>}:suspended`. Each trip is safe to repeat.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from celery5.broker.call import Call, Script, script_call
from celery5.broker.keys import Keys
from celery5.protocol.limits import LimitOverride, Suspension

SET_OVERRIDE = Script.load("limits/set_override")
LIST_OVERRIDES = Script.load("limits/list_overrides")

T = TypeVar("T", LimitOverride, Suspension)


class StoredOverrides(msgspec.Struct, frozen=True):
    """What is imposed on the tasks of an application, by their names: `limits` (and rates), and who is `suspended`."""

    limits: dict[str, LimitOverride]
    suspended: dict[str, Suspension]


def set_override(keys: Keys, task: str, override: LimitOverride | None) -> Call[bool]:
    """Impose a limit or a rate on a task in place of what was imposed before; None takes it back. Gives whether that
    changes anything."""
    words = b"" if override is None else msgspec.json.encode(override)
    return script_call(SET_OVERRIDE, (keys.limits,), (keys.limits, task, words, ""), bool, repeatable=True)


def suspend_task(keys: Keys, task: str, suspension: Suspension) -> Call[bool]:
    """Suspend a task, or give another reason for it."""
    words = msgspec.json.encode(suspension)
    return script_call(SET_OVERRIDE, (keys.suspended,), (keys.limits, task, words, ""), bool, repeatable=True)


def suspend_if_unchanged(
    keys: Keys, task: str, suspension: Suspension, before: Suspension | None
) -> Call[bool]:
    """Suspend a task that is as it was `before`; None: not suspended. Gives whether that changes anything."""
    words, only = msgspec.json.encode(suspension), b"-" if before is None else msgspec.json.encode(before)
    return script_call(
        SET_OVERRIDE, (keys.suspended,), (keys.limits, task, words, only), bool, repeatable=True
    )


def resume_task(keys: Keys, task: str, expected: Suspension | None = None) -> Call[bool]:
    """Let a task's jobs run again; with `only`, unless it is suspended in another way by now. Gives whether that
    changes anything."""
    words = b"" if expected is None else msgspec.json.encode(expected)
    return script_call(SET_OVERRIDE, (keys.suspended,), (keys.limits, task, "", words), bool, repeatable=True)


def list_overrides(keys: Keys) -> Call[StoredOverrides]:
    """What is imposed now. What cannot be read is passed over: a newer version may have written it."""
    return script_call(LIST_OVERRIDES, (keys.limits, keys.suspended), (), _impositions, repeatable=True)


def _impositions(raw: Sequence[Any]) -> StoredOverrides:
    return StoredOverrides(_read(raw[0], LimitOverride), _read(raw[1], Suspension))


def _read(words: Sequence[bytes], kind: type[T]) -> dict[str, T]:
    found: dict[str, T] = {}
    for task, what in zip(words[::2], words[1::2], strict=True):
        try:
            found[task.decode(errors="replace")] = msgspec.json.decode(what, type=kind)
        except msgspec.DecodeError:
            continue
    return found
