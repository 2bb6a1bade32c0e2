"""Define the documents of Data Sinks and Data Sources, and their recipients."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from celery5.errors import Corrupt, Misconfigured
from celery5.protocol.job.delivery import Delivery, Settlement, SinkDocument
from celery5.protocol.job.job import hash_call
from celery5.protocol.job.messages import Failure, read_document
from celery5.protocol.job.retry_policy import full_jitter

FIRST_DELIVERY_DELAY = 0.2
"""The longest wait in seconds after the first failure of a sink."""
MAX_DELIVERY_DELAY = 30.0
"""The longest wait in seconds after any failure."""


class DeliveryPacing(msgspec.Struct, frozen=True):
    """The batch size of a sink, and the wait after failures."""

    max_batch_size: int
    batch_size: int  # of the next batch
    failures: int = 0  # failed batches of one document in a row

    @classmethod
    def start(cls, most: int) -> "DeliveryPacing":
        """Return the initial pacing: the largest batches."""
        return cls(most, most)

    def after_success(self) -> "DeliveryPacing":
        """Return the pacing after a successful batch."""
        return msgspec.structs.replace(
            self, batch_size=min(self.max_batch_size, self.batch_size * 2), failures=0
        )

    def after_failure(self, number: int) -> "DeliveryPacing":
        """Return the pacing after a failed batch of `number` documents."""
        if number > 1:
            return msgspec.structs.replace(self, batch_size=max(1, number // 2))
        return msgspec.structs.replace(self, batch_size=1, failures=self.failures + 1)

    def get_delay(self, random: Callable[[], float]) -> float:
        """Return the seconds until the next batch. `random` returns numbers in [0, 1)."""
        if not self.failures:
            return 0.0
        return full_jitter(
            self.failures - 1, start=FIRST_DELIVERY_DELAY, cap=MAX_DELIVERY_DELAY, random=random
        )


ResultState = Literal["SUCCESS", "DEAD", "EXPIRED", "REVOKED", "REJECTED"]
"""The final states of a job, which documents record."""
RESULT_STATES: tuple[ResultState, ...] = ("SUCCESS", "DEAD", "EXPIRED", "REVOKED", "REJECTED")


class ResultDocument(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended, as Data Sinks get it. Times are seconds since 1970."""

    # Of the document, to detect duplicates: the job's id, after a replay with the number of replays, `k3j.1`.
    id: str
    job: str
    task: str
    queue: str
    state: str
    value: Any = None  # returned by the task, decoded from JSON
    error: str = ""  # the failure in one line
    failure: Failure | None = None
    reason: str = ""
    attempt: int = 1
    worker: str = ""
    sent: float = 0.0
    started: float = 0.0
    finished: float = 0.0

    def to_json(self) -> bytes:
        """Return the document as one line of JSON, without a line break."""
        return msgspec.json.encode(self)


class SourceDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A document from a Data Source: the one argument of the tasks that subscribe to the source."""

    body: bytes  # unchanged; `text` and `json` decode it
    # Unique in its `source`: a document with the same id is not taken again for a while.
    id: Annotated[str, Meta(max_length=200)] = ""
    source: str = ""
    attributes: dict[str, str] = {}  # such as the name of a file, or the fields of a request
    received: float = 0.0  # seconds since 1970

    def text(self) -> str:
        """Return the body as text. Raises UnicodeDecodeError if it is not UTF-8."""
        return self.body.decode()

    def json(self, kind: Any = Any) -> Any:
        """Return the body decoded from JSON, as the type `kind`. Raises ValueError."""
        return msgspec.json.decode(self.body, type=kind)


def parse_result_document(queue: str, raw: bytes, limit: int | None = None) -> ResultDocument:
    """Return a stored document in the form for sinks. `limit` is the setting `message_limit`. Raises Corrupt."""
    document = read_document(raw, limit)
    try:
        value = msgspec.json.decode(document.value)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"not a document: {error}") from None
    failure = document.failure
    return ResultDocument(
        id=f"{document.id}.{document.replays}" if document.replays else document.id,
        job=document.id,
        task=document.task,
        queue=queue,
        state=document.state,
        value=value,
        error="" if failure is None else f"{failure.type}: {failure.message}".removesuffix(": "),
        failure=failure,
        reason=document.reason,
        attempt=document.attempt,
        worker=document.worker,
        sent=document.sent,
        started=document.started,
        finished=document.finished,
    )


def group_recipients(wanting: Sequence[tuple[str, Collection[str]]]) -> Mapping[str, str] | None:
    """Return the names of the sinks by final state, separated by spaces; None when there are none.

    `wanting` has the name of each sink and the states that it wants.
    """
    names_by_state = {
        state: " ".join(name for name, states in wanting if state in states) for state in RESULT_STATES
    }
    return {state: names for state, names in names_by_state.items() if names} or None


def make_sink_argument(delivery: Delivery, settlement: Settlement) -> SinkDocument | None:
    """Return the document for Data Sinks, as `settle.lua` takes it; None when no sink gets it."""
    if delivery.recipients is None:
        return None
    state = _get_final_state(settlement)
    names = delivery.recipients.get(state, "")
    return SinkDocument(delivery.entry, names, delivery.document) if names else None


def _get_final_state(settlement: Settlement) -> str:
    """Return the state in which a settlement ends its job; '' when it goes on."""
    match settlement.verb:
        case "complete":
            return read_document(settlement.payload).state
        case "bury":
            return "DEAD"
        case "member":
            return "SUCCESS"
        case "ended":
            return settlement.final_state
        case _:
            return ""


def parse_result_states(states: object, what: str) -> tuple[ResultState, ...]:
    """Return the final states in a setting, such as `on`. Raises Misconfigured."""
    listed: Any = (states,) if isinstance(states, str) else states
    try:
        chosen = set(listed)
    except TypeError:
        chosen = {repr(states)}
    if not chosen or chosen - set(RESULT_STATES):
        raise Misconfigured(f"{what}: on is {states!r}; give some of {', '.join(RESULT_STATES)}")
    return tuple(state for state in RESULT_STATES if state in chosen)


def make_document_job_id(source: str, document: str, task: str) -> str:
    """Return the id of the job of `task` for a document of `source`.

    It is always the same, so a document that comes twice makes one job.
    """
    return hash_call(msgspec.json.encode((source, document, task)))
