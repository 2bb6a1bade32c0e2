"""The pages of jobs: search them, and read the story of one."""

import math
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from celery5.dashboard.page import Page, PageRequest
from celery5.errors import Misconfigured, UnknownQueue
from celery5.logs.destination import has_journal
from celery5.observability.job_search import JobPage
from celery5.protocol.commands.definitions import get_inbox_name
from celery5.protocol.durations import format_duration
from celery5.protocol.job.history import JobRecord
from celery5.protocol.job.messages import Failure
from celery5.protocol.job.states import JobState
from celery5.protocol.job.story import JobDetails, describe_deaths, explain_awaited_code, list_takes
from celery5.protocol.job.verdict import FOREIGN_REASONS
from celery5.protocol.masking import MASK
from celery5.protocol.shards import get_queue_of_shard
from celery5.protocol.workflows.member_ids import parse_member_id

FILTERS = (
    "id",
    "task",
    "queue",
    "state",
    "error",
    "worker",
    "argument",
    "since",
    "until",
    "longer_than",
    "sort",
)
STATES = [(state.value, state.value.lower()) for state in JobState if state is not JobState.UNKNOWN]
"""The states to choose from, as they are given and shown."""
ROWS = 100
"""Jobs on one page."""


async def load_jobs(request: PageRequest) -> Mapping[str, Any]:
    """Return the jobs that fit the filters of the address."""
    filters = request.choose(*FILTERS)
    # The next page goes on with the search of this one, so it counts its times from the same moment.
    at = request.query.get("at") or str(int(time.time()) + 1)
    found, wrong = JobPage(jobs=(), cursor=None, looked_at=0, not_looked_at=""), ""
    try:
        found = await request.read(
            "task:search", limit=ROWS, at=at, cursor=request.query.get("cursor"), **filters
        )
    except (UnknownQueue, Misconfigured) as error:  # the form stays, to be corrected
        wrong = str(error)
    return {"found": found, "filters": filters, "at": at, "states": STATES, "wrong": wrong}


async def load_job(request: PageRequest) -> Mapping[str, Any]:
    """Return all that is known of a job."""
    job: JobDetails = await request.read("task:show", id=request.path["id"], queue=request.query.get("queue"))
    member = parse_member_id(job.id)
    worker = "" if job.has_ended or job.is_from_history else get_inbox_name(job.worker)
    wants_stack = bool(worker) and request.wants("stack")
    return {
        "job": job,
        "queue": get_queue_of_shard(job.queue),
        "story": tell_story(job, time.time()),
        "run": member.run if member else "",
        "worker": worker,
        "stack": (await request.read("worker:stack", job=job.id, to=[worker]))[0] if wants_stack else None,
        "can_revoke": not job.has_ended and not job.revoked,
        "can_repeat": bool(job.task) and has_all_arguments(job),
        "has_journal": has_journal(os.environ),
        "is_dead": job.state is JobState.DEAD and not job.is_from_history,
    }


def has_all_arguments(job: JobDetails) -> bool:
    """Return whether the arguments are known as they were sent: none is redacted or lost."""
    if job.is_from_history or (job.args is None and job.kwargs is None):
        return False
    return MASK not in msgspec.json.encode([job.args, job.kwargs]).decode()


class StoryLine(msgspec.Struct, frozen=True):
    """One thing that happened to a job."""

    # Seconds since 1970; 0 when unknown.
    at: float
    text: str
    # '', `warn` or `bad`.
    tone: str = ""
    traceback: str = ""


def tell_story(job: JobDetails, now: float) -> list[StoryLine]:
    """Return what happened to a job, in order; what has no time comes last, as where it is now."""
    return sorted(_tell(job, now), key=lambda line: line.at or math.inf)


def _tell(job: JobDetails, now: float) -> Iterator[StoryLine]:
    if job.sent:
        key = f", with the key {job.key}" if job.key else ""
        priority = f", with {job.priority} priority" if job.priority != "normal" else ""
        yield StoryLine(job.sent, f"sent to queue {job.queue}{priority}{key}")
    for take in list_takes(job):
        if take.is_past:
            yield StoryLine(take.at, f"{take.label} by {take.worker}")
    for death in job.deaths:
        why = f": {death.why}" if death.why else ""
        yield StoryLine(death.at, f"worker {death.worker} died with it{why}", "bad")
    # The last traceback is shown by itself.
    tracebacks = {failure.attempt: failure.traceback for failure in job.failures if failure != job.failure}
    for attempt in job.attempts:
        traceback = tracebacks.get(attempt.attempt, "") if attempt.replays == job.replays else ""
        yield from _tell_attempt(attempt, traceback)
    if not job.attempts:
        for failure in job.failures:
            yield _tell_failure(failure)
    if job.has_ended and not job.attempts:
        yield from _tell_end(job)
    if not job.has_ended:
        yield from _tell_now(job, now)


def _tell_attempt(attempt: JobRecord, traceback: str) -> Iterator[StoryLine]:
    replay = f" of replay {attempt.replays}" if attempt.replays else ""
    name = f"attempt {attempt.attempt}{replay}"
    if attempt.state == JobState.REVOKED.value and not attempt.worker:
        yield StoryLine(attempt.ended, "revoked while it waited", "warn")
        return
    if attempt.ran is not None:
        limit = f" and at the limit of {attempt.limit}" if attempt.limit else ""
        waited = (
            "" if attempt.waited is None else f" after {format_duration(attempt.waited)} on the queue{limit}"
        )
        yield StoryLine(attempt.ended - attempt.ran, f"{name} began on {attempt.worker}{waited}")
    ran = "" if attempt.ran is None else f" after {format_duration(attempt.ran)}"
    if attempt.reason in FOREIGN_REASONS:
        ran = " without having run"
        ran += "" if attempt.waited is None else f", after {format_duration(attempt.waited)} for other code"
    why = f": {attempt.error or attempt.reason}" if attempt.error or attempt.reason else ""
    verb, tone = _ENDS.get(attempt.state, (f"ended as {attempt.state}", ""))
    again = ""
    if attempt.state == JobState.RETRY.value:
        delay = "" if attempt.delay is None else f" in {format_duration(attempt.delay)}"
        again = f", to be tried again{delay}"
    yield StoryLine(attempt.ended, f"{name} {verb}{ran}{again}{why}", tone, traceback)


def _tell_failure(failure: Failure) -> StoryLine:
    where = f" on {failure.worker}" if failure.worker else ""
    return StoryLine(
        failure.at,
        f"attempt {failure.attempt} failed{where}: {failure.type}: {failure.message}",
        "bad",
        failure.traceback,
    )


def _tell_end(job: JobDetails) -> Iterator[StoryLine]:
    """Yield how a job ended of which the history has no attempt."""
    if job.started:
        yield StoryLine(job.started, f"attempt {job.attempt} began on {job.worker}")
    if not job.failures or job.state is not JobState.DEAD:
        verb, tone = _ENDS.get(job.state.value, (f"ended as {job.state.value}", ""))
        ran = f" after {format_duration(max(0.0, job.finished - job.started))}" if job.started else ""
        error = f": {job.failure.type}: {job.failure.message}" if job.failure else ""
        yield StoryLine(job.finished, f"attempt {job.attempt} {verb}{ran}{error}", tone)
    if job.state is JobState.DEAD:
        yield StoryLine(job.finished, f"became a dead letter: {job.reason or 'nobody knows why'}", "bad")


def _tell_now(job: JobDetails, now: float) -> Iterator[StoryLine]:
    """Yield where a job is that lives."""
    if job.revoked:
        yield StoryLine(0.0, f"revoked; {job.stops_when or 'its worker is about to stop it'}", "warn")
    if job.limit:
        yield StoryLine(0.0, f"waits at the limit of {job.limit}; jobs ahead of it: {job.jobs_ahead}", "warn")
    elif awaited_code := explain_awaited_code(job, "then"):
        yield StoryLine(job.due, f"waits for {awaited_code}", "warn")
    elif job.due > now:
        word = "its next attempt" if job.state is JobState.RETRY else "its time"
        yield StoryLine(job.due, f"waits for {word}")
    elif job.worker:
        deaths = describe_deaths(job.deliveries)
        again = [f"{take.label}: " for take in list_takes(job) if not take.is_past and take.label != "taken"]
        yield StoryLine(
            job.taken,
            f"{''.join(again)}attempt {job.attempt} runs on {job.worker}{'; ' if deaths else ''}{deaths}",
        )
    elif job.is_queue_paused:
        yield StoryLine(0.0, f"waits on queue {job.queue}, which is paused", "warn")
    else:
        yield StoryLine(0.0, f"waits on queue {job.queue} for a worker")


_ENDS = {
    "SUCCESS": ("succeeded", ""),
    "RETRY": ("failed", "warn"),
    "DEAD": ("failed for good", "bad"),
    "REVOKED": ("was revoked", "warn"),
    "EXPIRED": ("expired before it began", "warn"),
    "REJECTED": ("was rejected", "bad"),
    "HELD": ("was put back to wait at a limit", ""),
    "SCHEDULED": ("was postponed", ""),
}
"""How an attempt ended, in words, and whether that needs a person."""

JOB_PAGES = (
    Page(path="jobs", template="jobs.html", title="Jobs", load=load_jobs, nav="Jobs", refresh=0.0),
    Page(path="jobs/{id:path}", template="job.html", title="Job {id}", load=load_job, refresh=3.0),
)
"""The pages of jobs."""
