"""Read what the screen shows, and perform what a person asks for."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from celery5.cli.top.readings import ActiveJob, Reading, read_running_jobs
from celery5.cli.top.tables import View
from celery5.commands.control import find_failures
from celery5.errors import BrokerError, CeleryError
from celery5.observability.alerts import summarize_alerts
from celery5.observability.metrics import HistoryPoint
from celery5.protocol.commands.definitions import ACTIVE, PAUSE_QUEUE, RESUME_QUEUE
from celery5.protocol.counts import format_count
from celery5.protocol.job.dead_letters import DeadJob
from celery5.protocol.job.failure_groups import DeadJobGroup
from celery5.protocol.masking import get_error_text
from celery5.protocol.observability.overview import Overview

if TYPE_CHECKING:
    from celery5.app import App

MAX_DEAD = 500
"""Dead letters that are read, the newest. How many have a cause is counted where they die."""
MAX_SEARCHED = 200
"""Dead letters of its queues in which the last failures of a task are looked for."""
MAX_FAILURES = 10
"""Failures that the details of a task show."""
MAX_ASKED = 50
"""Workers that are asked what runs."""
MAX_HISTORIES = 5
"""Queues whose history the details of a task show."""
ANSWER_TIMEOUT = 2.0
"""Seconds that workers have to say what runs."""
COMMAND_TIMEOUT = 5.0
"""Seconds that workers have to pause a queue."""


class TopSources:
    """Reads an application for the screen. For plain Python, in one thread at a time."""

    def __init__(self, app: "App", *, since: float) -> None:
        self._app = app
        self._since = since

    def read(self, view: View, details: str) -> Reading:
        """Return what a view needs, and the details of the row with a key; '' for none. Raises CeleryError."""
        overview = self._app.metrics.overview(since=self._since)
        dead, dead_note = self._read_dead() if view is View.DEAD else (None, "")
        jobs: Sequence[ActiveJob] | None = None
        jobs_note = ""
        if view is View.JOBS or (view is View.WORKERS and details):
            only = [details] if view is View.WORKERS else [worker.name for worker in overview.workers]
            jobs, jobs_note = self._read_jobs(only)
        histories: Mapping[str, Sequence[HistoryPoint]] | None = None
        failures: Sequence[DeadJob] | None = None
        if view is View.QUEUES and details:
            histories = self._read_histories([details])
        elif view is View.TASKS and details:
            queues = next((task.queues for task in overview.tasks if task.name == details), ())
            histories = self._read_histories(queues[:MAX_HISTORIES])
            failures = self._read_failures(details, queues, overview)
        return Reading(
            overview=overview,
            dead=dead,
            dead_note=dead_note,
            jobs=jobs,
            jobs_note=jobs_note,
            histories=histories,
            failures=failures,
            details_of=details,
            alerts=self._read_alerts(),
        )

    def _read_alerts(self) -> str:
        """Return what alerts fire, in a line; '' where the broker that has them cannot be reached."""
        with suppress(BrokerError):
            return summarize_alerts(self._app.alerts.list())
        return ""

    def _read_histories(self, queues: Iterable[str]) -> dict[str, Sequence[HistoryPoint]]:
        return {queue: self._app.metrics.history(queue, step=60) for queue in queues}

    def _read_dead(self) -> tuple[Sequence[DeadJobGroup], str]:
        with self._app.brokers.reachable():
            found = self._app.dlq.groups(newest_first=True, limit=MAX_DEAD)
        others = found.total - sum(group.count for group in found.groups)
        note = (
            f"{format_count(others, 'more dead letter has another cause', 'more dead letters have other causes')}"
            if others > 0
            else ""
        )
        return found.groups, note

    def _read_failures(self, task: str, queues: Sequence[str], overview: Overview) -> list[DeadJob]:
        dead = [queue.name for queue in overview.queues if queue.name in queues and queue.dead]
        if not dead:
            return []
        newest = islice(self._app.dlq.read(queue=dead, newest_first=True), MAX_SEARCHED)
        return list(islice((job for job in newest if job.task == task), MAX_FAILURES))

    def _read_jobs(self, workers: Sequence[str]) -> tuple[list[ActiveJob], str]:
        if not workers:
            return [], ""
        try:
            with self._app.brokers.reachable():
                replies = self._app.control.send(
                    ACTIVE.name, to=workers[:MAX_ASKED], timeout=ANSWER_TIMEOUT, expires=ANSWER_TIMEOUT
                )
        except CeleryError as error:
            return [], get_error_text(error)
        jobs = [job for reply in replies if reply.ok for job in read_running_jobs(reply.worker, reply.answer)]
        silent = [reply for reply in replies if not reply.ok]
        notes = [f"{silent[0].worker}: {silent[0].why}"] if silent else []
        if len(silent) > 1:
            notes.append(f"{len(silent) - 1} more have not answered")
        if len(workers) > MAX_ASKED:
            notes.append(
                f"{format_count(len(workers) - MAX_ASKED, 'more worker was', 'more workers were')} not asked"
            )
        return sorted(jobs, key=lambda job: -job.seconds), "; ".join(notes)

    def set_paused(self, queue: str, *, paused: bool) -> str:
        """Pause a queue in all workers, or resume it; return what became of it. Raises CeleryError."""
        command = PAUSE_QUEUE if paused else RESUME_QUEUE
        replies = self._app.control.send(command.name, {"queue": queue}, timeout=COMMAND_TIMEOUT)
        state = "paused" if paused else "resumed"
        failed = find_failures(replies)
        if failed:
            asked = format_count(len(failed) + sum(reply.ok for reply in replies), "worker")
            return f"{len(failed)} of {asked} did not do it: {failed[0].worker}: {failed[0].why}"
        return f"{queue} is {state}" if replies else f"{queue} is {state} for workers that start later"

    def count_dead(self, group: DeadJobGroup) -> int:
        """Return how many dead letters a group has. Raises CeleryError."""
        return sum(self._app.dlq.count("queue", group=group.id).values())

    def replay_dead(self, group: DeadJobGroup) -> str:
        """Replay the dead letters of a group; return what became of them. Raises CeleryError."""
        tally = self._app.dlq.replay(group=group.id)
        left = "".join(f", {count:,} left ({why})" for why, count in tally.left.items())
        return f"{tally.done:,} replayed{left}"
