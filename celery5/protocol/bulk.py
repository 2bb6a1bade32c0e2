"""Bulk actions: what is done to many jobs or runs, how far it has come, and how both are stored."""

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, cast, get_args

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.bounded_decoding import read_whole
from celery5.protocol.job.dead_letters import CONDITION_WORDS, parse_filter
from celery5.protocol.text_values import RATE
from celery5.similar_names import did_you_mean

BulkVerb = Literal["dlq:replay", "dlq:purge", "task:revoke", "workflow:retry"]
"""What is done, by its name in the audit trail."""

WAITING, RUNNING = "waiting", "running"
DONE, STOPPED, FAILED, INTERRUPTED = "done", "stopped", "failed", "interrupted"
"""States. An action is `interrupted` when its process has died or ended: it can be resumed."""

MAX_COUNTED = 100_000
"""Jobs or runs that are looked at to count them before an action."""
_WORDS: Mapping[str, tuple[str, ...]] = {
    "dlq:replay": CONDITION_WORDS,
    "dlq:purge": CONDITION_WORDS,
    "task:revoke": ("queue", "task"),
    "workflow:retry": ("queue", "workflow"),
}
_NEEDED = {"task:revoke": "queue"}


class BulkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An action on all dead jobs, waiting jobs or failed runs that a filter selects."""

    # `dlq:replay`, `dlq:purge`, `task:revoke` (jobs that wait) or `workflow:retry` (runs that have failed).
    verb: BulkVerb
    # Of dead jobs: the conditions of `DeadJobFilter`. Of waiting jobs:
    # `queue` and `task`. Of runs: `queue` and `workflow`.
    filter: Mapping[str, Any] = {}
    # At most this many per second, or a text such as `50/s`; None for no limit.
    rate: float | str | None = None
    # Count, and change nothing.
    dry_run: bool = False


class BulkProgress(msgspec.Struct, kw_only=True):
    """How far a bulk action has come."""

    # What was selected when it began; when `is_exact` is false, there are at least this many.
    total: int = 0
    is_exact: bool = True
    done: int = 0
    failed: int = 0
    # Left alone, since somebody else was first, or since it cannot be done now.
    skipped: int = 0
    # The first failure.
    error: str = ""

    def add(self, *, done: int, failed: int, skipped: int, error: str) -> None:
        """Add what became of a batch."""
        self.done += done
        self.failed += failed
        self.skipped += skipped
        self.error = self.error or error
        self.total = max(self.total, self.done + self.failed + self.skipped)


class BulkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A bulk action, its state and its progress."""

    id: str
    action: BulkRequest
    # `waiting`, `running`, `done`, `stopped`, `failed` or `interrupted`.
    state: str
    progress: BulkProgress
    # Who asked for it, and from where.
    who: str
    source: str
    # Seconds since 1970, by the clock of Redis; `ended` is 0 while it has not ended.
    created: float
    ended: float
    # When it last came further, by the same clock: long ago while it waits, for a rate or for Redis. 0: not known.
    changed: float = 0.0
    # Who has asked to stop it; '' for nobody.
    stopped_by: str = ""

    @property
    def stopping(self) -> bool:
        """Whether it is going to stop."""
        return bool(self.stopped_by) and self.state in (WAITING, RUNNING)

    @property
    def has_ended(self) -> bool:
        """Whether it is over for good."""
        return self.state in (DONE, STOPPED, FAILED)


def check_bulk_action(action: BulkRequest) -> BulkRequest:
    """Return the action with its rate as a number and its times in seconds. Raises Misconfigured."""
    if action.verb not in get_args(BulkVerb):
        hint = did_you_mean(
            action.verb, get_args(BulkVerb), otherwise=f"use one of {', '.join(get_args(BulkVerb))}"
        )
        raise Misconfigured(f"no bulk action {action.verb!r}; {hint}")
    words = {
        name: value.total_seconds() if isinstance(value, timedelta) else value
        for name, value in action.filter.items()
        if value is not None
    }
    allowed = _WORDS[action.verb]
    if unknown := [name for name in words if name not in allowed]:
        raise Misconfigured(f"{action.verb} does not select by {unknown[0]!r}, but by {', '.join(allowed)}")
    if (needed := _NEEDED.get(action.verb)) and not words.get(needed):
        raise Misconfigured(f"{action.verb}: give a {needed}")
    if action.verb.startswith("dlq:"):
        parse_filter(words)
    for name in ("queue", "task", "workflow"):
        if name in words:
            list_texts(words, name)
    return msgspec.structs.replace(action, filter=words, rate=check_rate(action.rate))


def list_texts(words: Mapping[str, Any], name: str) -> list[str]:
    """Return the texts of one word of a filter; none when it is not there. Raises Misconfigured."""
    value: Any = words.get(name, ())
    is_text = isinstance(value, str) or not isinstance(value, list | tuple)
    texts: list[Any] = [value] if is_text else list(cast("list[Any]", value))
    if not all(isinstance(text, str) and text for text in texts):
        raise Misconfigured(f"{name} is {value!r}: give a text, or several")
    return texts


def check_rate(rate: object) -> float | None:
    """Return a rate as a number per second; None, or '', is no limit. Raises Misconfigured."""
    if rate is None or rate == "":
        return None
    if isinstance(rate, str):
        return RATE.parse(rate).per_second
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise Misconfigured(
            f"rate is {rate!r}: give a number per second, more than 0, or a text such as 50/s"
        )
    return float(rate)


def encode_action(action: BulkRequest, who: str, source: str, progress: BulkProgress) -> dict[str, str]:
    """Return the fields of a new action."""
    text = msgspec.json.encode(action).decode()
    return {"action": text, "who": who, "source": source, "progress": encode_progress(progress)}


def encode_progress(progress: BulkProgress) -> str:
    """Return a progress as it is stored."""
    return msgspec.json.encode(progress).decode()


def parse_status(action_id: str, fields: Mapping[str, str], *, has_lease: bool) -> BulkStatus | None:
    """Return a stored action; None when there is none, or when it cannot be read."""
    try:
        action = msgspec.json.decode(fields["action"], type=BulkRequest)
        progress = msgspec.json.decode(fields["progress"], type=BulkProgress)
    except (KeyError, msgspec.MsgspecError, RecursionError):
        return None
    state = fields.get("state", WAITING)
    if state in (WAITING, RUNNING) and not has_lease:
        state = INTERRUPTED
    return BulkStatus(
        id=action_id,
        action=action,
        state=state,
        progress=progress,
        who=fields.get("who", ""),
        source=fields.get("source", ""),
        created=_seconds(fields.get("created", "")),
        ended=_seconds(fields.get("ended", "")),
        changed=_seconds(fields.get("changed", "")),
        stopped_by=fields.get("stop", ""),
    )


def _seconds(ms: str) -> float:
    return read_whole(ms) / 1000


def shift_ages(words: Mapping[str, Any], elapsed: float) -> dict[str, Any]:
    """Return a filter of dead jobs for the same jobs some time later, without those that have died since."""
    shifted = dict(words)
    shifted["older_than"] = float(words.get("older_than", 0.0)) + elapsed
    if "newer_than" in words:
        shifted["newer_than"] = float(words["newer_than"]) + elapsed
    return shifted


UNKNOWN_ACTION = "no bulk action {}: they are kept for a day"
"""The error for a bulk action that Redis does not have."""
