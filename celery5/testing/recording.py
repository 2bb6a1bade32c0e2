"""Record jobs and events that are sent instead of publishing them, and run them in the test."""

import asyncio
import contextvars
import sys
import time
from types import FrameType
from typing import Any

import trio

from celery5.app import App
from celery5.broker.colour import current_colour
from celery5.errors import Misconfigured, NotRecorded, Reject, Retry
from celery5.protocol.events.messages import make_event_job
from celery5.protocol.job.arguments import encode_value
from celery5.protocol.job.failure_call import make_failure_job
from celery5.protocol.job.job import new_id
from celery5.protocol.job.messages import VERSION, Document, encode, read_command
from celery5.protocol.job.verdict import Reason
from celery5.runners.context import CURRENT_JOB, CurrentJob
from celery5.runners.outcome import make_failure
from celery5.testing.sent_messages import SentJob, SentMessages, make_sent_job

PACKAGE = __name__.partition(".")[0]
MAX_JOBS = 10_000
"""The most jobs that one `run` runs: tasks that send each other would run without end."""


class Recorded(SentMessages):
    """What an application has sent while `recorded` was in force, instead of publishing it."""

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self._run_count = 0
        self._routed_count = 0

    def clear(self) -> None:
        """Remove all recorded jobs and events."""
        super().clear()
        self._run_count = self._routed_count = 0

    def run(self) -> list[Any]:
        """Run the jobs that have not run yet, and those that they send, one by one in order. Return their results.

        Arguments and results are encoded as JSON and decoded, as with a broker; subscribers of events run, too. Jobs
        with a countdown run at once. The first error is raised unchanged and without a retry, after the `on_failure`
        job of the failed job. Limits, keys and other functions of workers and brokers are left out. For plain Python;
        from Trio, call it in a thread.
        """
        values: list[Any] = []
        while (job := self._next()) is not None:
            if len(values) == MAX_JOBS:
                raise Misconfigured(
                    f"{MAX_JOBS} jobs have run, and more are recorded: do their tasks send each other without end?"
                )
            try:
                values.append(_run_job(self._app, job))
            except Exception as error:
                self._call_on_failure(job, error)
                raise
        return values

    def _call_on_failure(self, sent: SentJob, error: Exception) -> None:
        """Send and run the `on_failure` job of one that has failed: here every failure is the last one."""
        command = read_command(sent.job.message)
        if command.on_failure is None or isinstance(error, Retry):
            return
        reason = Reason.NOT_RETRIED if isinstance(error, Reject) else Reason.EXHAUSTED
        document = Document(VERSION, sent.id, sent.task, "DEAD", failure=make_failure(error), reason=reason)
        job = make_failure_job(new_id(), sent.job.message, encode(document), now=time.time())
        failure_job = make_sent_job(self._app, job)
        self.jobs.insert(self._run_count, failure_job)
        self._run_count += 1
        try:
            _run_job(self._app, failure_job)
        except Exception as other:
            error.add_note(f"its on_failure job of {job.task} failed, too: {type(other).__name__}: {other}")

    def _next(self) -> SentJob | None:
        self._route()
        if self._run_count == len(self.jobs):
            return None
        self._run_count += 1
        return self.jobs[self._run_count - 1]

    def _route(self) -> None:
        """Create the jobs of the subscribers of new events."""
        new_events, self._routed_count = self.events[self._routed_count :], len(self.events)
        for event in new_events:
            for subscription in self._app.events.group_subscriptions().get(self._app.name, []):
                if event.subject in subscription.subjects:
                    self.jobs.append(
                        make_sent_job(self._app, make_event_job(event, subscription, now=time.time()))
                    )


def refuse_unrecorded() -> None:
    """Raise NotRecorded, which names what the test has called, unless a worker in this process lends its connection."""
    if current_colour() == "trio":
        from celery5.broker import ambient_trio

        if ambient_trio.has_lent_driver():
            return
    raise NotRecorded(
        f"{_find_called(sys._getframe(1))} needs a broker, and recorded(app) opens no connection: "  # pyright: ignore[reportPrivateUsage]
        "it keeps jobs and events that are sent, whose run() returns the results; test everything else with "
        "in_memory(app)"
    )


def _find_called(frame: FrameType | None) -> str:
    """Return the name of the function of this package that code outside of it has called, to get to `frame`."""
    name = ""
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == PACKAGE:
        name = frame.f_code.co_qualname
        frame = frame.f_back
    return f"{name}()" if name and not name.startswith("_") and "<" not in name else "this"


def _run_job(app: App, sent: SentJob) -> Any:
    """Run one job as a worker would, and return its result as `get` would return it."""
    task, command = app.tasks[sent.task], read_command(sent.job.message)
    args, kwargs = task.parameters.decode(command.args, command.kwargs)

    def call() -> Any:
        CURRENT_JOB.set(CurrentJob(sent.id, sent.task, sent.queue, 1, "test", None, command.trace))
        if task.loop == "thread":
            return task.function(*args, **kwargs)
        return asyncio.run(await_function()) if task.loop == "asyncio" else trio.run(await_function)

    async def await_function() -> Any:
        return await task.function(*args, **kwargs)

    value = contextvars.copy_context().run(call)
    return None if command.ignore_result else task.result_type.decode(encode_value(value))
