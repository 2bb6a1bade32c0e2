"""What the screen shows besides the overview: dead letters by cause, running jobs, and the details of one row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from celery5.cli.terminal.output import format_progress
from celery5.observability.metrics import HistoryPoint
from celery5.protocol.job.dead_letters import DeadJob
from celery5.protocol.job.failure_groups import DeadJobGroup
from celery5.protocol.observability.overview import Overview


@dataclass(frozen=True, slots=True)
class ActiveJob:
    """A job that a worker runs."""

    id: str
    task: str
    worker: str
    queue: str
    # Seconds since it began.
    seconds: float
    attempt: int
    arguments: str
    progress: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read for the screen at one time. What was not needed is None."""

    overview: Overview | None = None
    dead: Sequence[DeadJobGroup] | None = None
    dead_note: str = ""
    jobs: Sequence[ActiveJob] | None = None
    jobs_note: str = ""
    # The history of each queue of the row whose details are shown, and the newest dead letters of it.
    histories: Mapping[str, Sequence[HistoryPoint]] | None = None
    failures: Sequence[DeadJob] | None = None
    # The row that the last two are about.
    details_of: str = ""
    # What alerts fire, in a line; '' for none.
    alerts: str = ""
    # Why the last reading failed; '' when it did not.
    error: str = ""


def read_running_jobs(worker: str, answer: Any) -> list[ActiveJob]:
    """Return the running jobs of a worker's answer to `active`; what cannot be any is left out."""
    jobs: list[ActiveJob] = []
    for found in cast("list[object]", answer) if isinstance(answer, list) else []:
        if not isinstance(found, Mapping):
            continue
        job = cast("Mapping[str, Any]", found)
        seconds, attempt, progress = job.get("seconds"), job.get("attempt"), job.get("progress")
        jobs.append(
            ActiveJob(
                id=str(job.get("id", "")),
                task=str(job.get("task", "")),
                worker=worker,
                queue=str(job.get("queue", "")),
                seconds=float(seconds) if isinstance(seconds, int | float) else 0.0,
                attempt=attempt if isinstance(attempt, int) else 1,
                arguments=str(job.get("arguments", "")),
                progress=_format_report(progress),
            )
        )
    return jobs


def _format_report(report: object) -> str:
    if not isinstance(report, Mapping):
        return ""
    found = cast("Mapping[str, Any]", report)
    done, total = found.get("done"), found.get("total")
    if not isinstance(done, int | float) or not isinstance(total, int | float | None):
        return ""
    return format_progress(done, total, str(found.get("note", "")))
