"""Read and write event messages and subscriptions, and make the jobs of subscribers.

`celery5/protocol/event.schema.json` publishes the message. Unknown fields survive.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from celery5.errors import Corrupt
from celery5.protocol.job.job import DEDUPLICATION_WINDOW, Job, derive_job_id
from celery5.protocol.job.messages import MAX_DEPTH, format_lock, is_nested_deeper, refuse_oversized
from celery5.protocol.shards import choose_shard

VERSION = 1


class EventMessage(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """An Event message: `event` happened, of that `version`, with these `fields`. Times are seconds since 1970."""

    v: int
    id: Annotated[str, Meta(min_length=1, max_length=200)]
    event: Annotated[str, Meta(min_length=1, max_length=500)]
    version: Annotated[int, Meta(ge=1)] = 1
    fields: dict[str, Raw] = {}
    sent: float = 0.0
    trace: str = ""
    headers: dict[str, str] | None = None

    @property
    def subject(self) -> str:
        """Return the subject: the event's name and version."""
        return format_subject(self.event, self.version)


class Subscription(msgspec.Struct, frozen=True):
    """One task's subscription to some `versions` of an `event`, as the registry in Redis keeps it.

    `job` is the template of its jobs, without id and arguments. The task `takes` these fields; null: all. A job expires
    `expires_in` seconds after the event is routed. `defaults` are the values of fields that an event of an older
    producer lacks. So a Router does not need the subscriber's code.
    """

    event: str
    versions: tuple[int, ...]
    job: Job
    takes: tuple[str, ...] | None = None
    expires_in: float | None = None
    defaults: dict[str, Raw] = {}

    @property
    def subjects(self) -> tuple[str, ...]:
        """What it is subscribed to."""
        return tuple(format_subject(self.event, version) for version in self.versions)

    @property
    def name(self) -> str:
        """Its name in the registry: one task has one subscription to an event."""
        return subscription_name(self.event, self.job.app, self.job.task)


def subscription_name(event: str, app: str, task: str) -> str:
    """The name in the registry of a task's subscription to an event."""
    return f"{event}\n{app}\n{task}"


def format_subject(event: str, version: int) -> str:
    """An event of one version, in one word."""
    return f"{event} {version}"


def parse_event(raw: bytes, limit: int | None = None) -> EventMessage:
    """Decode an Event message. `limit` is the setting `message_limit`, for a message that comes from Redis.

    Raises Corrupt with the reason, and nothing else, whatever the bytes are.
    """
    refuse_oversized(raw, limit, "an event")
    try:
        message = _EVENT.decode(raw)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"not an event: {error}") from None
    if message.v != VERSION:
        raise Corrupt(
            f"event message of version {message.v}; this Router reads version {VERSION}: upgrade the Routers first"
        )
    if len(raw) > 2 * MAX_DEPTH and is_nested_deeper(raw, MAX_DEPTH + 50):
        raise Corrupt(f"not an event: nested deeper than {MAX_DEPTH + 50}")
    return message


def parse_subscription(raw: bytes, limit: int | None = None) -> Subscription | None:
    """Return one entry of the registry; None when it cannot be read: from a newer version, or too large."""
    try:
        refuse_oversized(raw, limit, "a subscription")
        subscription = _SUBSCRIPTION.decode(raw)
        _FIELDS.decode(subscription.job.message)
    except (ValueError, RecursionError):
        return None
    return subscription


def group_by_subject(subscriptions: Iterable[Subscription]) -> Mapping[str, Sequence[Subscription]]:
    """Return the subscriptions by subject."""
    by_subject: dict[str, list[Subscription]] = {}
    for subscription in subscriptions:
        for subject in subscription.subjects:
            by_subject.setdefault(subject, []).append(subscription)
    return by_subject


def make_job_template(job: Job) -> tuple[Job, float | None]:
    """Return `job` without the fields that differ for each job, and the seconds until such jobs expire."""
    job = job.with_sent()
    fields = _FIELDS.decode(job.message)
    sent, expires = (msgspec.json.decode(fields.pop(name, Raw(b"null"))) for name in ("sent", "expires"))
    for name in ("id", "key", "args", "kwargs", "trace", "headers", "event"):
        fields.pop(name, None)
    message = _ENCODER.encode(fields)
    expires_in = None if expires is None else round(float(expires) - float(sent or 0.0), 3)
    return msgspec.structs.replace(job, id="", message=message, lock="", unique_for=None), expires_in


def make_event_job(event: EventMessage, subscription: Subscription, *, now: float) -> Job:
    """Return the job of a subscriber for an event.

    Its id is derived from the event's id and the subscriber, so that the job runs once even if several Routers make it.
    """
    job, takes = subscription.job, subscription.takes
    job_id = derive_job_id(event.id, job.app, job.task)
    values = {**subscription.defaults, **event.fields} if subscription.defaults else event.fields
    kwargs = values if takes is None else {name: values[name] for name in takes if name in values}
    fields: dict[str, Any] = _FIELDS.decode(job.message)
    fields.update(id=job_id, kwargs=kwargs, sent=now, key=job_id, event=f"{event.event} {event.id}")
    if event.trace:
        fields["trace"] = event.trace
    if event.headers:
        fields["headers"] = event.headers
    if subscription.expires_in is not None:
        fields["expires"] = now + subscription.expires_in
    return msgspec.structs.replace(
        job,
        id=job_id,
        queue=choose_shard(job.queue, job.shards, job_id),
        shards=1,
        message=_ENCODER.encode(fields),
        lock=format_lock(job.task, job_id),
        unique_for=DEDUPLICATION_WINDOW,
    )


_EVENT = msgspec.json.Decoder(EventMessage)
_SUBSCRIPTION = msgspec.json.Decoder(Subscription)
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_ENCODER = msgspec.json.Encoder()
encode = _ENCODER.encode
