"""Show all that is known of a job, and its attempts (`task show`)."""

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from celery5.cli.terminal.output import (
    clean_lines,
    format_cell,
    format_fields,
    format_progress,
    format_table,
    format_time,
    to_json,
)
from celery5.logs.destination import has_journal
from celery5.protocol.durations import format_age, format_duration
from celery5.protocol.job.history import format_arguments
from celery5.protocol.job.story import describe_deaths, explain_awaited_code, list_takes
from celery5.protocol.job.verdict import FOREIGN_REASONS
from celery5.protocol.workflows.member_ids import parse_member_id

if TYPE_CHECKING:
    from celery5.protocol.job.history import JobRecord
    from celery5.protocol.job.messages import Failure, WorkerDeath
    from celery5.protocol.job.story import JobDetails


def format_job_details(details: "JobDetails", now: float, suspension: str = "") -> Iterator[str]:
    """Yield the details of a job for people, part by part.

    `now` is seconds since 1970. `suspension` is a text about that of its task, '' for none.
    """
    fields = [*_fields(details, now), ("suspended", suspension)]
    yield format_fields({name: value for name, value in fields if value not in ("", None)})
    if details.failure is not None and details.failure.traceback:
        yield f"\n{clean_lines(details.failure.traceback)}"
    if details.deaths:
        yield "\nworkers that died with it"
        yield from (f"  {format_cell(_format_death(death, now))}" for death in details.deaths)
    earlier = [failure for failure in details.failures if failure != details.failure]
    if details.attempts:
        yield "\nattempts in the history"
        yield from format_attempts(details.attempts)
    elif earlier:
        yield "\nattempts that failed"
        yield from (f"  {failure.attempt}  {format_cell(_format_failure(failure))}" for failure in earlier)


def _fields(details: "JobDetails", now: float) -> Iterator[tuple[str, object]]:
    yield "id", details.id
    yield "run", member.run if (member := parse_member_id(details.id)) else ""
    yield "queue", details.queue
    yield "state", details.state.value + (", revoked" if details.revoked and not details.has_ended else "")
    yield "stops", details.stops_when
    yield "task", details.task
    yield "attempt", _format_attempt(details)
    yield "sections", ", ".join(f"{count} for {name}" for name, count in (details.sections or {}).items())
    yield "replays", details.replays or None
    yield "deliveries", describe_deaths(details.deliveries) or None
    yield "event", details.event
    yield "key", details.key
    yield "priority", details.priority if details.priority != "normal" else ""
    yield "worker", details.worker
    yield "arguments", format_cell(format_arguments(details.arguments))
    yield "sent", _format_moment(details.sent, now)
    yield "due", _format_moment(details.due, now)
    yield "waits at", _format_waiting(details)
    yield "waits for", format_cell(explain_awaited_code(details, _format_moment(details.due, now)))
    yield "expires", _format_moment(details.expires, now)
    yield from _format_takes(details, now)
    yield "started", _format_moment(details.started, now)
    yield "progress", _format_job_progress(details, now)
    yield "finished", _format_moment(details.finished, now)
    yield "took", format_duration(max(0.0, details.finished - details.started)) if details.started else None
    yield "reason", details.reason or _explain_end(details)
    yield "entry", details.dead_entry
    yield "error", f"{details.failure.type}: {details.failure.message}" if details.failure else None
    yield "value", format_cell(to_json(details.value)) if details.has_result else None
    yield "trace", details.trace
    shows_log = details.attempts and has_journal(os.environ)
    yield "log", f"journalctl CELERY5_JOB={details.id}" if shows_log else ""


def _format_takes(details: "JobDetails", now: float) -> Iterator[tuple[str, str]]:
    """Yield when workers took a job; which ones, where there were several."""
    takes = list_takes(details)
    texts = {
        take: _format_moment(take.at, now) + (f" by {take.worker}" if len(takes) > 1 else "")
        for take in takes
    }
    for label in dict.fromkeys(take.label for take in takes):
        yield label, "; ".join(text for take, text in texts.items() if take.label == label)


def _explain_end(details: "JobDetails") -> str:
    """Return why a job expired or was revoked; '' for other states."""
    if details.state == "EXPIRED":
        return "no worker began it before it expired"
    if details.state == "REVOKED":
        return (
            f"revoked while {details.worker} had it" if details.worker else "revoked before a worker had it"
        )
    return ""


def _format_waiting(details: "JobDetails") -> str:
    """Return at which limit a held job waits, and its place, or at which paused queue; '' for other jobs."""
    if details.is_queue_paused:
        return f"queue {details.queue}, which is paused"
    if not details.limit or details.jobs_ahead is None:
        return ""
    return f"the limit of {details.limit}; jobs ahead of it: {details.jobs_ahead}"


def _format_attempt(details: "JobDetails") -> str:
    for_sections = sum((details.sections or {}).values())
    limit = "" if details.max_retries is None else f" of {details.max_retries + 1 + for_sections}"
    return f"{details.attempt}{limit}"


def _format_job_progress(details: "JobDetails", now: float) -> str:
    progress = details.progress
    if progress is None:
        return ""
    age = format_age(min(progress.at, now), now)
    return f"{format_progress(progress.done, progress.total, progress.note)} ({age})"


def _format_moment(moment: float, now: float) -> str:
    time_text = format_time(moment)
    if not time_text:
        return ""
    return f"{time_text} ({format_age(moment, now)})"


def _format_death(death: "WorkerDeath", now: float) -> str:
    why = f": {death.why}" if death.why else ""
    return f"{_format_moment(death.at, now)}  {death.worker}{why}"


def _format_failure(failure: "Failure") -> str:
    place = " ".join(filter(None, (format_time(failure.at), failure.worker)))
    return f"{failure.type}: {failure.message}" + (f" ({place})" if place else "")


def format_attempts(attempts: "Sequence[JobRecord]") -> Iterator[str]:
    """Yield the attempts of a job for people, a line for each."""
    rows: list[dict[str, object]] = [
        {
            "attempt": job.attempt,
            "ended": format_time(job.ended),
            "state": job.state,
            "waited": format_seconds(job.waited) or "-",
            "ran": "never" if job.reason in FOREIGN_REASONS else format_seconds(job.ran) or "-",
            "worker": job.worker,
            "limit": job.limit,
            "error": format_cell(job.error or job.reason),
        }
        for job in attempts
    ]
    empty = {name for name in rows[0] if all(row[name] == "" for row in rows)}
    shown = [{name: value for name, value in row.items() if name not in empty} for row in rows]
    yield from (f"  {line}" for line in format_table(shown, empty="").splitlines())


def format_seconds(seconds: float | None) -> str:
    """Return a time span for people; empty for none."""
    return "" if seconds is None else format_duration(seconds)
