"""Describe one job in detail, from its message and its document."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from celery5.protocol.counts import format_count
from celery5.protocol.job.foreign import is_lacking
from celery5.protocol.job.history import JobRecord
from celery5.protocol.job.messages import (
    Command,
    Document,
    Failure,
    Refusal,
    WorkerDeath,
    get_sent,
    try_decode_value,
    try_read_command,
    try_read_document,
)
from celery5.protocol.job.progress import Progress
from celery5.protocol.job.states import FINISHED, LANES, JobState, Place, get_entry, get_state
from celery5.protocol.job.verdict import FOREIGN_REASONS, Reason
from celery5.protocol.limits import unescape_word


class JobDetails(msgspec.Struct, frozen=True):
    """The details of a job.

    Times are seconds since 1970; 0 when unknown. Redis deletes the message of a job, and so its arguments, when the job
    succeeds.
    """

    id: str
    queue: str
    state: JobState
    task: str = ""
    attempt: int = 1
    # None when unknown: the task is not declared here, or the job has succeeded.
    max_retries: int | None = None
    # Attempts made for `retry` sections, by the section's name.
    sections: Mapping[str, int] | None = None
    replays: int = 0
    # How many workers died with it, and the last of them.
    deliveries: int = 0
    deaths: tuple[WorkerDeath, ...] = ()
    revoked: bool = False
    # When it stops that was revoked while it runs, for people; '' where that is at once.
    stops_when: str = ""
    key: str = ""
    priority: str = "normal"
    worker: str = ""
    # Arguments and value are decoded JSON.
    args: Any = None
    kwargs: Any = None
    # The arguments by parameter, for people; `App.find` leaves this empty. A positional argument without a known name
    # has its number. If the message is gone, these are the shortened arguments of the history.
    arguments: Mapping[str, Any] = {}
    sent: float = 0.0
    # When a scheduled job or a retry may start.
    due: float = 0.0
    expires: float = 0.0
    # When its present worker took it, in seconds since 1970.
    taken: float = 0.0
    started: float = 0.0
    finished: float = 0.0
    value: Any = None
    reason: str = ""
    failure: Failure | None = None
    failures: tuple[Failure, ...] = ()
    # Its entry in the dead-letter queue.
    dead_entry: str = ""
    # The limit that it waits for: the task, and the key if it has one.
    limit: str = ""
    # How many jobs are ahead of it in the waiting list.
    jobs_ahead: int | None = None
    # Whether it waits on a queue that is paused in all workers; `App.find` does not look for that.
    is_queue_paused: bool = False
    # Which code could not run it, while it waits for a worker with other code until it is `due`.
    waits_for_code: Refusal | None = None
    # What it has reported while it runs.
    progress: Progress | None = None
    # Its traceparent; '' when unknown.
    trace: str = ""
    # The event that it is for: its name, a blank and its id; '' when there is none, or it is not known.
    event: str = ""
    # Its attempts that the history has, the first one first. `App.find` does not look for them.
    attempts: tuple[JobRecord, ...] = ()
    # Only the history knows of it: its result has expired, and there are no `args`.
    is_from_history: bool = False

    @property
    def has_ended(self) -> bool:
        """Return whether the job has ended."""
        return self.state in FINISHED

    @property
    def has_result(self) -> bool:
        """Return whether `value` is its result."""
        return self.state is JobState.SUCCESS and not self.is_from_history


class JobInspection(msgspec.Struct, frozen=True, kw_only=True):
    """All that the server has of a job. Times are seconds since 1970; 0 when unknown."""

    # Its place as its queue has it; '' when it has ended or is unknown.
    place: str
    message: bytes
    document: bytes
    # The worker that has it, and since when.
    worker: str = ""
    taken: float = 0.0
    # The same in seconds until now; None when no worker has it.
    held_for: float | None = None
    # The time that it waits for.
    due: float = 0.0
    # How many workers died with it, and the last of them.
    deliveries: int = 0
    deaths: tuple[WorkerDeath, ...] = ()
    # How many jobs are ahead of it in its waiting list; None when it is in none.
    jobs_ahead: int | None = None
    # Whether it is in one though its task has no limit: it waits for a worker with a slot.
    is_unlimited: bool = False
    # What a worker has stored of it.
    progress: Progress | None = None

    @property
    def limit(self) -> str:
        """The limit at which it waits; '' for none."""
        is_at_limit = self.place.startswith(Place.LIMITED) and not self.is_unlimited
        return format_limit(self.place) if is_at_limit else ""


def make_job_details(
    job_id: str, queue: str, found: JobInspection, *, limit: int | None = None
) -> JobDetails:
    """Return the details of a job.

    Data larger than `limit` (the setting `message_limit`) is not decoded.
    """
    command, _ = try_read_command(found.message, limit)
    end = try_read_document(found.document, limit)
    place, worker, progress = found.place, found.worker, found.progress
    letter = place[:1]
    # A job that lives has no end yet, whatever lies there.
    ended = end if not place or letter == Place.DEAD else None
    state = get_state(place, has_worker=bool(worker))
    if not place and ended:
        state = JobState(ended.state) if ended.state in JobState.__members__ else JobState.UNKNOWN
    story = JobDetails(
        id=job_id,
        queue=queue,
        state=state,
        worker=worker,
        taken=found.taken,
        due=found.due,
        deliveries=max(found.deliveries, len(found.deaths)),
        deaths=found.deaths,
        revoked=letter == Place.REVOKED or state is JobState.REVOKED,
        dead_entry=place[1:] if letter == Place.DEAD else "",
        limit=found.limit,
        jobs_ahead=found.jobs_ahead if found.limit else None,
        progress=progress if progress and worker and progress.worker == worker else None,
    )
    if command is not None:
        story = _with_message(story, command, get_sent(command, get_entry(place)))
        if letter == Place.HELD and command.refused is not None:
            story = msgspec.structs.replace(story, waits_for_code=command.refused)
    return _with_end(story, ended) if ended else story


def _get_order(record: JobRecord) -> tuple[float, int, int]:
    """Return what attempts are sorted by. Two may end in the same millisecond."""
    return (record.ended, record.replays, record.attempt)


def add_attempts(details: JobDetails | None, records: Sequence[JobRecord]) -> JobDetails | None:
    """Return the details of a job with its attempts in the history; None when nothing is known of it.

    Attempts that only its message tells of are among them.
    """
    if details is None and not records:
        return None
    attempts = {(attempt.replays, attempt.attempt, attempt.ended): attempt for attempt in records}
    if details is None:
        details = _make_from_record(max(attempts.values(), key=_get_order))
    known = {(attempt.replays, attempt.attempt) for attempt in records}
    for failure in details.failures if records else ():
        is_end = details.has_ended and failure.attempt == details.attempt  # added below, with its state
        if not is_end and (details.replays, failure.attempt) not in known:
            record = JobRecord(
                id=details.id,
                queue=details.queue,
                state=JobState.RETRY.value,
                task=details.task,
                attempt=failure.attempt,
                replays=details.replays,
                worker=failure.worker,
                ended=failure.at,
                error_type=failure.type,
                error_message=failure.message,
            )
            attempts[record.replays, record.attempt, record.ended] = record
    if records and details.has_ended and (details.replays, details.attempt) not in known:
        end = make_record(details)
        attempts[end.replays, end.attempt, end.ended] = end
    in_order = sorted(attempts.values(), key=_get_order)
    trace = details.trace or next((attempt.trace for attempt in in_order if attempt.trace), "")
    event = details.event or next((attempt.event for attempt in in_order if attempt.event), "")
    return msgspec.structs.replace(details, attempts=tuple(in_order), trace=trace, event=event)


def make_record(details: JobDetails) -> JobRecord:
    """Return the record of the last attempt of a job, made from its details."""
    failure = details.failure or (details.failures[-1] if details.failures else None)
    return JobRecord(
        id=details.id,
        queue=details.queue,
        state=details.state.value,
        task=details.task,
        attempt=details.attempt,
        replays=details.replays,
        deliveries=details.deliveries,
        worker=details.worker,
        sent=details.sent,
        due=details.due,
        ended=details.finished,
        ran=max(details.finished - details.started, 0.0) if details.finished and details.started else None,
        error_type=failure.type if failure else "",
        error_message=failure.message if failure else "",
        reason=details.reason,
        limit=details.limit,
        trace=details.trace,
        event=details.event,
    )


def _make_from_record(record: JobRecord) -> JobDetails:
    return JobDetails(
        id=record.id,
        queue=record.queue,
        state=JobState(record.state) if record.state in JobState.__members__ else JobState.UNKNOWN,
        task=record.task,
        attempt=record.attempt,
        replays=record.replays,
        deliveries=record.deliveries,
        worker=record.worker,
        sent=record.sent,
        started=max(record.ended - record.ran, 0.0) if record.ran is not None else 0.0,
        finished=record.ended,
        reason=record.reason,
        failure=Failure(
            type=record.error_type,
            message=record.error_message,
            attempt=record.attempt,
            worker=record.worker,
            at=record.ended,
        )
        if record.error_type
        else None,
        is_from_history=True,
    )


def describe_deaths(count: int) -> str:
    """Return how many workers died with a job, in words; '' for none."""
    return f"{format_count(count, 'worker')} died with it" if count else ""


class Take(NamedTuple):
    """A worker that took a job."""

    # `taken`, or which time it was: `first taken`, `taken before`, `taken again`.
    label: str
    # When, in seconds since 1970.
    at: float
    worker: str
    # Whether the worker died with the job.
    is_past: bool


def list_takes(details: JobDetails) -> list[Take]:
    """Return which workers took a job, and when: those that died with it, then the one that has it."""
    past = [death for death in details.deaths if death.taken]
    # A job that was retried or replayed was also taken by workers that did not die. Only the last deaths are stored.
    knows_first = details.attempt == 1 and not details.replays and details.deliveries == len(past)
    takes = [
        Take("first taken" if knows_first and not number else "taken before", death.taken, death.worker, True)
        for number, death in enumerate(past)
    ]
    if details.taken:
        takes.append(Take("taken again" if takes else "taken", details.taken, details.worker, False))
    return takes


def explain_awaited_code(details: JobDetails, due: str) -> str:
    """Return which code a foreign job waits for, and what becomes of it when it is `due`; '' for other jobs."""
    refusal = details.waits_for_code
    if refusal is None:
        return ""
    if is_lacking(refusal.by):
        return f"a worker with the resources that {details.task} takes, however long that is"
    code = f"has task {details.task}"
    if refusal.by:
        code += f" with other parameters than {', '.join(refusal.by)}"
    if not refusal.since:
        return (
            f"a worker whose code {code}: one was live at the last look, and gets it when it has a free slot; "
            f"the next look is at {due}"
        )
    reason = Reason.BAD_ARGUMENTS if refusal.by else Reason.UNKNOWN_TASK
    return f"a worker whose code {code}: none is live; if none comes by {due}, it is dead: {reason.value}"


def format_limit(place: str) -> str:
    """Return the limit at which a job with that place waits: its task, the tenant and the key."""
    task, fair, token = (unescape_word(word) for word in place.split(" ", 3)[1:])
    return ", ".join(filter(None, (task, fair and f"tenant {fair}", token and f"key {token}")))


def _with_message(story: JobDetails, command: Command, sent: float) -> JobDetails:
    return msgspec.structs.replace(
        story,
        task=command.task,
        attempt=command.attempt,
        max_retries=command.retry.max_retries if command.retry else None,
        sections=command.sections,
        replays=command.replays,
        key=command.key,
        priority=command.priority if command.priority in LANES else "normal",
        args=try_decode_value(command.args),
        kwargs=try_decode_value(command.kwargs),
        sent=sent,
        expires=command.expires or 0.0,
        failures=command.failures,
        trace=command.trace,
        event=command.event,
    )


def _with_end(story: JobDetails, end: Document) -> JobDetails:
    never_ran = (
        end.state == JobState.EXPIRED or end.reason in FOREIGN_REASONS
    )  # a worker looked at it, and no more
    return msgspec.structs.replace(
        story,
        task=end.task or story.task,
        attempt=end.attempt,
        replays=end.replays,
        worker=end.worker,
        sent=end.sent or story.sent,
        started=0.0 if never_ran else end.started,
        finished=end.finished,
        value=try_decode_value(end.value),
        reason=end.reason,
        failure=end.failure,
        deliveries=max(story.deliveries, end.deliveries),
        deaths=story.deaths or end.deaths,
    )
