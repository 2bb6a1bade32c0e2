"""Build the calls that keep bulk actions: claim one, save its progress, stop it, and read them."""

from collections.abc import Mapping
from typing import Any

from celery5.broker.call import Call, Script, Word, decode_text, script_call, to_ms
from celery5.broker.keys import Keys

CLAIM_ACTION = Script.load("bulk/claim_action", "clock")
SAVE_ACTION = Script.load("bulk/save_action", "clock")
STOP_ACTION = Script.load("bulk/stop_action", "clock")

CLAIMED, TAKEN, UNKNOWN, ENDED = 1, 0, -1, -2
"""What `claim_action` returns."""
LOST, SAVED, STOP_ASKED = 0, 1, 2
"""What `save_action` returns."""
NOT_STOPPED, ASKED, STOPPED_NOW = 0, 1, 2
"""What `stop_action` returns."""
ACTION_TTL = 86_400.0
"""Seconds that an action is kept after its last change."""
MAX_ACTIONS = 1000
"""Actions that the list keeps."""


def claim_action(
    keys: Keys, action_id: str, process: str, fields: Mapping[str, str], *, lease: float
) -> Call[int]:
    """Claim a new action with these fields, or without fields one that was interrupted."""
    words: tuple[Word, ...] = tuple([word for item in fields.items() for word in item])
    return script_call(
        CLAIM_ACTION,
        (keys.bulk_action(action_id), keys.bulk_lease(action_id), keys.bulk_actions),
        (process, to_ms(lease), to_ms(ACTION_TTL), action_id, MAX_ACTIONS, *words),
        int,
        repeatable=True,
    )


def save_action(
    keys: Keys,
    action_id: str,
    process: str,
    fields: Mapping[str, str],
    *,
    lease: float,
    has_ended: bool = False,
) -> Call[int]:
    """Renew the lease, or give it up with 0, and save fields. Repeated at the end of an action, it returns LOST."""
    words: tuple[Word, ...] = tuple([word for item in fields.items() for word in item])
    return script_call(
        SAVE_ACTION,
        (keys.bulk_action(action_id), keys.bulk_lease(action_id)),
        (process, to_ms(lease), to_ms(ACTION_TTL), int(has_ended), *words),
        int,
        repeatable=True,
    )


def stop_action(keys: Keys, action_id: str, who: str) -> Call[int]:
    """Ask to stop an action, in the name of `who`."""
    return script_call(
        STOP_ACTION, (keys.bulk_action(action_id), keys.bulk_lease(action_id)), (who,), int, repeatable=True
    )


def list_actions(keys: Keys, *, count: int) -> Call[list[str]]:
    """Return the ids of actions, the newest first."""
    return Call(("ZREVRANGE", keys.bulk_actions, 0, count - 1), _texts, repeatable=True)


def read_action(keys: Keys, action_id: str) -> Call[dict[str, str]]:
    """Return the fields of an action, none when it is not known."""
    return Call(("HGETALL", keys.bulk_action(action_id)), _fields, repeatable=True)


def has_lease(keys: Keys, action_id: str) -> Call[dict[str, str]]:
    """Return whether a process performs an action: fields, or none."""
    return Call(("GET", keys.bulk_lease(action_id)), _holder, repeatable=True)


def _texts(raw: Any) -> list[str]:
    return [decode_text(text) for text in raw]


def _fields(raw: Any) -> dict[str, str]:
    words = [decode_text(word) for word in raw]
    return dict(zip(words[::2], words[1::2], strict=True))


def _holder(raw: Any) -> dict[str, str]:
    return {"process": decode_text(raw)} if raw else {}
