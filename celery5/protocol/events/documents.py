"""Documents: what Data Sinks are given and Data Sources bring, and who takes which (C4, C85, C86)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from celery5.errors import Corrupt, Misconfigured
from celery5.protocol.job.delivery import Delivery, Settlement, SinkDocument
from celery5.protocol.job.envelope import Failure, read_document
from celery5.protocol.job.job import hash_call
from celery5.protocol.job.retry_policy import full_jitter

FIRST_DELIVERY_DELAY = 0.2
"""Seconds that a sink is left alone at most after its first failure."""
MAX_DELIVERY_DELAY = 30.0
"""Seconds that it is at most."""


@dataclass(frozen=True, slots=True)
class DeliveryPacing:
    """`most` is how many documents a batch may have, `size` how many the next one has; `failures` counts how many
    documents in a row have failed alone."""

    max_batch_size: int
    batch_size: int
    failures: int = 0

    @classmethod
    def start(cls, most: int) -> "DeliveryPacing":
        """Before anything is known."""
        return cls(most, most)

    def after_success(self) -> "DeliveryPacing":
        """A batch was written."""
        return replace(self, batch_size=min(self.max_batch_size, self.batch_size * 2), failures=0)

    def after_failure(self, number: int) -> "DeliveryPacing":
        """A batch of so many was not."""
        if number > 1:
            return replace(self, batch_size=max(1, number // 2))
        return replace(self, batch_size=1, failures=self.failures + 1)

    def get_delay(self, random: Callable[[], float]) -> float:
        """Seconds until the next batch. `random` gives numbers in [0, 1)."""
        if not self.failures:
            return 0.0
        return full_jitter(
            self.failures - 1, start=FIRST_DELIVERY_DELAY, cap=MAX_DELIVERY_DELAY, random=random
        )


ResultState = Literal["SUCCESS", "DEAD", "EXPIRED", "REVOKED", "REJECTED"]
"""How a job may end: what a document tells of."""
RESULT_STATES: tuple[ResultState, ...] = ("SUCCESS", "DEAD", "EXPIRED", "REVOKED", "REJECTED")


class ResultDocument(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended, as a Data Sink is given it.

    `id` is the document's own: a sink that is given one twice knows it by that. It is the job's id, and after a replay
    that and the number of replays, `k3j.1`. `value` is what the task returned, as JSON has it. `error` tells of a
    failure in one line, `failure` all that is known of it. `sent`, `started` and `finished` are seconds since 1970.
    """

    id: str
    job: str
    task: str
    queue: str
    state: str
    value: Any = None
    error: str = ""
    failure: Failure | None = None
    reason: str = ""
    attempt: int = 1
    worker: str = ""
    sent: float = 0.0
    started: float = 0.0
    finished: float = 0.0

    def to_json(self) -> bytes:
        """All of it as one line of JSON, without its end."""
        return msgspec.json.encode(self)


class SourceDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What a Data Source has brought, as it came: the tasks that have subscribed to it take this one argument.

    `id` tells it from all others of its `source`: whatever comes again under it is not taken again for a while. `body`
    is bytes, which `text` and `json` read. `attributes` are words about it, such as the name of a file or the fields of
    a request. `received` is seconds since 1970.
    """

    body: bytes
    id: Annotated[str, Meta(max_length=200)] = ""
    source: str = ""
    attributes: dict[str, str] = {}
    received: float = 0.0

    def text(self) -> str:
        """The body, as UTF-8. Raises UnicodeDecodeError."""
        return self.body.decode()

    def json(self, kind: Any = Any) -> Any:
        """The body, as JSON; of the type `kind`, where one is given. Raises ValueError."""
        return msgspec.json.decode(self.body, type=kind)


def parse_result_document(queue: str, raw: bytes, limit: int | None = None) -> ResultDocument:
    """A document as it lies in Redis, for sinks. `limit` is the setting `message_limit`. Raises Corrupt."""
    found = read_document(raw, limit)
    try:
        value = msgspec.json.decode(found.value)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"not a document: {error}") from None
    failure = found.failure
    return ResultDocument(
        id=f"{found.id}.{found.replays}" if found.replays else found.id,
        job=found.id,
        task=found.task,
        queue=queue,
        state=found.state,
        value=value,
        error="" if failure is None else f"{failure.type}: {failure.message}".removesuffix(": "),
        failure=failure,
        reason=found.reason,
        attempt=found.attempt,
        worker=found.worker,
        sent=found.sent,
        started=found.started,
        finished=found.finished,
    )


def group_recipients(wanting: Sequence[tuple[str, Collection[str]]]) -> Mapping[str, str] | None:
    """The names of the sinks for each end, with a space between; `wanting` says of each sink which ends it wants. None
    when there are no sinks, so that nobody need look further."""
    found = {end: " ".join(name for name, ends in wanting if end in ends) for end in RESULT_STATES}
    return {end: names for end, names in found.items() if names} or None


def make_sink_argument(delivery: Delivery, settlement: Settlement) -> SinkDocument | None:
    """Return what the settle script takes for the document that Data Sinks get, None when none gets it."""
    if delivery.recipients is None or settlement.verb not in ("complete", "bury"):
        return None
    state = "DEAD" if settlement.verb == "bury" else read_document(settlement.payload).state
    names = delivery.recipients.get(state, "")
    return SinkDocument(delivery.entry, names, delivery.document) if names else None


def parse_result_states(said: object, what: str) -> tuple[ResultState, ...]:
    """The ends that somebody wants to hear of. Raises Misconfigured."""
    named: Any = (said,) if isinstance(said, str) else said
    try:
        wanted = set(named)
    except TypeError:
        wanted = {repr(said)}
    if not wanted or wanted - set(RESULT_STATES):
        raise Misconfigured(f"{what}: on is {said!r}; give some of {', '.join(RESULT_STATES)}")
    return tuple(end for end in RESULT_STATES if end in wanted)


def make_document_job_id(source: str, document: str, task: str) -> str:
    """The id of the job by which `task` is given a document of `source`: always the same one, so that it is one job
    however often the document comes."""
    return hash_call(msgspec.json.encode((source, document, task)))
