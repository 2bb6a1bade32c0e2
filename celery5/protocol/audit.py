"""The audit trail: what an entry says of one action, and how it is stored."""

import re
from collections.abc import Mapping, Sized
from typing import Any, Literal, cast, get_args

import msgspec

from celery5.protocol.bounded_decoding import read_whole
from celery5.protocol.masking import mask_shown

AuditSource = Literal["cli", "python", "dashboard"]
"""What an action came from."""
SOURCES: tuple[AuditSource, ...] = get_args(AuditSource)

DONE = "done"
"""An outcome. The others are `failed: ` or `interrupted: ` and why."""

ACTIONS: Mapping[str, str] = {
    "alert:test": "a notification sent to try the webhook",
    "alert:silence": "a rule of alerts silenced",
    "alert:unsilence": "the silence of a rule ended",
    "bulk:resume": "an interrupted bulk action resumed",
    "dlq:replay": "dead jobs, or dead records of a stream, sent again",
    "dlq:purge": "dead jobs, or dead records of a stream, deleted",
    "event:send": "an event sent by a person",
    "event:unsubscribe": "the subscription of a task withdrawn",
    "event:resubscribe": "a withdrawn subscription allowed again",
    "queue:purge": "the jobs that wait on a queue revoked",
    "schedule:add": "a schedule added",
    "schedule:change": "the times of a schedule changed",
    "schedule:pause": "a schedule paused",
    "schedule:remove": "a schedule removed",
    "schedule:resume": "a schedule resumed",
    "schedule:trigger": "a job of a schedule sent",
    "stream:send": "records sent by a person",
    "stream:quarantine": "a partition quarantined, or its quarantine ended",
    "stream:release": "parked keys released, or discarded",
    "stream:reset": "a group begun again, or forgotten",
    "stream:reshard": "the number of partitions changed",
    "stream:seek": "a group moved",
    "task:send": "a job sent by a person",
    "task:limit": "a limit or a rate set, or lifted",
    "task:resume": "a suspended task resumed",
    "task:revoke": "jobs revoked",
    "task:suspend": "a task suspended",
    "workflow:cancel": "a run cancelled",
    "workflow:retry": "a run started again from where it failed",
    "workflow:signal": "a value given to a run",
}
"""The actions besides control commands, which are `worker:<command>` and `controller:<command>`, in words."""
PROCESS_NOUNS = ("worker", "controller")

MAX_WHO, MAX_TARGET, MAX_FILTER, MAX_OUTCOME = 200, 500, 2000, 500
"""Characters that are kept of each."""


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One action that somebody has taken."""

    # Its id in the trail.
    id: str
    # A user and a host, or the name that the caller has given.
    who: str
    # `cli`, `python` or `dashboard`.
    source: str
    # A noun and a verb of the command line: `dlq:replay`, `worker:pause-queue`.
    action: str
    # What it was done to: a queue, a task, ids, names of processes.
    target: str = ""
    # What selects a part of the target, and how it was done.
    filter: Mapping[str, Any] = {}
    # How many jobs, records, keys or processes it has changed; None where nothing is counted.
    count: int | None = None
    # `done`, or `failed: ` or `interrupted: ` and why.
    outcome: str = DONE
    # The id of the job that did it; '' for none.
    job: str = ""

    @property
    def at(self) -> float:
        """When it ended, in seconds since 1970, by the clock of Redis."""
        return read_whole(self.id.partition("-")[0]) / 1000


def encode_entry(entry: AuditEntry) -> list[str]:
    """Return the fields and values of an entry in turns, without its id, shortened."""
    selection = {name: value for name, value in entry.filter.items() if not _is_empty(value)}
    fields = {
        "who": entry.who[:MAX_WHO],
        "source": entry.source,
        "action": entry.action[:MAX_WHO],
        "target": entry.target[:MAX_TARGET],
        "filter": _encode_filter(selection) if selection else "",
        "count": "" if entry.count is None else str(entry.count),
        "outcome": entry.outcome[:MAX_OUTCOME],
        "job": entry.job,
    }
    return [word for name, value in fields.items() if value for word in (name, value)]


def _is_empty(value: object) -> bool:
    return value is None or value is False or (isinstance(value, Sized) and not len(value))


def _encode_filter(selection: Mapping[str, Any]) -> str:
    text = msgspec.json.encode(mask_shown(selection), enc_hook=str).decode()
    return text if len(text) <= MAX_FILTER else msgspec.json.encode({"shortened": text[:MAX_FILTER]}).decode()


def parse_entry(entry_id: str, fields: Mapping[str, str]) -> AuditEntry:
    """Return a stored entry. What another program has written is shown as far as possible."""
    try:
        selection = msgspec.json.decode(fields.get("filter", "") or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        selection = cast("dict[str, Any]", {"unreadable": fields["filter"]})
    count = fields.get("count", "")
    return AuditEntry(
        id=entry_id,
        who=fields.get("who", ""),
        source=fields.get("source", ""),
        action=fields.get("action", ""),
        target=fields.get("target", ""),
        filter=selection,
        count=int(count) if count.isdigit() and len(count) < 20 else None,
        outcome=fields.get("outcome", ""),
        job=fields.get("job", ""),
    )


def is_entry_id(text: str) -> bool:
    """Return whether an entry may have this id."""
    return re.fullmatch(r"\d{1,20}-\d{1,20}", text, re.ASCII) is not None


def is_action(name: str) -> bool:
    """Return whether an action may have this name."""
    noun, colon, verb = name.partition(":")
    return name in ACTIONS or bool(noun in PROCESS_NOUNS and colon and verb)


def is_of_action(action: str, wanted: str) -> bool:
    """Return whether an action is the wanted one, or one of the wanted noun."""
    return action == wanted or action.partition(":")[0] == wanted
