"""Publish an application's jobs on their brokers, at once or by the backlog.

With several brokers the jobs of each are sent separately: an unreachable broker delays only its own.
"""

import os
import sys
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from msgspec import UNSET

from celery5.application import Application
from celery5.broker.call import Call
from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.colour import get_awaitable_colour, run_in_thread
from celery5.broker.driver import BlockingDriver
from celery5.broker.keys import QueueKeys
from celery5.errors import (
    BrokerError,
    BrokerUnavailable,
    CircuitOpen,
    Misconfigured,
    NotReplicated,
)
from celery5.middleware.middleware import ObservedApplication
from celery5.protocol.counts import choose_form, format_count
from celery5.protocol.job.job import Job
from celery5.results.async_result import AsyncResult
from celery5.runners.context import CURRENT_JOB, CURRENT_PARTITION
from celery5.sending.publisher import PublishPlanner
from celery5.sending.publisher_client import DaemonSender
from celery5.tasks.declaration import find_tasks
from celery5.tasks.task import Signature, Task

if TYPE_CHECKING:
    from celery5.health.health_check import DeclareCheck
    from celery5.sending.memory_backlog import Backlog
    from celery5.sending.publishing_checks import ProcessChecks

R = TypeVar("R")


def check_signatures(given: Iterable[Signature[R]]) -> list[Signature[R]]:
    """Return the signatures for `send_many`. Raises TypeError for anything else."""
    signatures = _listed(given, "send_many", "task.s(...)")
    for signature in signatures:
        if type(signature) is not Signature:
            raise TypeError(
                f"send_many takes signatures, got {_shown(signature)}: {_instead(signature, 'task.s(...)')}"
            )
    return signatures


def check_jobs(given: Iterable[Job]) -> list[Job]:
    """Return the jobs for `send_jobs`. Raises TypeError for anything else."""
    jobs = _listed(given, "send_jobs", "task.job(...)")
    for job in jobs:
        if type(job) is not Job:
            raise TypeError(f"send_jobs takes jobs, got {_shown(job)}: {_instead(job, 'task.job(...)')}")
    return jobs


def check_job_id(given: str) -> str:
    """Return the id for `result` or `find`. Raises TypeError for anything else."""
    if not isinstance(cast("object", given), str):
        raise TypeError(f"a job's id is a text, got {_shown(given)}")
    return given


def check_tasks_declared(app: Application, jobs: list[Job]) -> list[Job]:
    """Return the jobs.

    Raises:
        Misconfigured: A job is of a foreign application's task: the workers of its queue do not have that task.
    """
    for job in jobs:
        if job.app != app.name and job.app and not _has(app, job.task):
            raise Misconfigured(
                f"task {job.task} is of application {job.app!r}, not of {app.name!r}: send it there, or declare it "
                f"with celery5.task and include its module in {app.name!r}"
            )
    return jobs


def _has(app: Application, name: str) -> bool:
    """Return whether `app` has a task, or includes it as a free one that a different application adopted first."""
    app.load()
    return name in app.tasks or any(task.had_no_app and task.name == name for task in find_tasks(app))


def _listed(given: Any, what: str, wanted: str) -> list[Any]:
    if type(given) is list:
        return cast("list[Any]", given)
    if not isinstance(given, Iterable) or isinstance(given, Job | str | bytes):
        raise TypeError(f"{what} takes a list, got {_shown(given)}: write {what}([{wanted}])")
    return list(cast("Iterable[Any]", given))


def _instead(thing: object, wanted: str) -> str:
    if isinstance(thing, AsyncResult):
        return f"it was sent already; write {wanted}, not delay"
    if isinstance(thing, Job):
        return "send it with send_jobs"
    if isinstance(thing, Signature):
        return "send it with send_many"
    if isinstance(thing, bytes):
        return "make it a job with Job.from_bytes(...)"
    return f"write {wanted}"


def _shown(thing: Any) -> str:
    return (
        "a signature"
        if isinstance(thing, Signature)
        else "a task"
        if isinstance(thing, Task)
        else repr(thing)[:80]
    )


REPLICATION_TIMEOUT = 1.0
"""Seconds to wait for replicas."""


def publish_replicated(
    redis: BlockingDriver, keys: QueueKeys, calls: Sequence[Call[Any]], jobs: Sequence[Job], *, wanted: int
) -> list[Any]:
    """Publish `jobs` by `calls`, and return the replies once `wanted` replicas have them.

    This needs a connection that no other caller uses now, since WAIT blocks it, and so never the one that all
    tasks of a Trio program share.

    Raises:
        NotReplicated: The jobs are published, but too few replicas have them in time.
        BrokerError: As when they are published without waiting.
    """
    waits = jobs_calls.wait_for_replicas(keys, replicas=wanted, within=REPLICATION_TIMEOUT)
    replies, result = redis.perform_replicated(calls, waits)
    count, reason = (result, "") if isinstance(result, int) else (0, f" ({result})")
    if count < wanted:
        raise NotReplicated(
            f"{_count(jobs)} published, but after {REPLICATION_TIMEOUT:g} s {count} of "
            f"{format_count(wanted, 'replica')} {choose_form(wanted, 'has', 'have')} all of that{reason}; "
            "what was published will run: do not send it again, look at the replicas",
            ids=tuple(job.id for job in jobs),
            replicas=count,
            wanted=wanted,
        )
    return replies


def _count(jobs: Sequence[Job]) -> str:
    return f"job {jobs[0].id} is" if len(jobs) == 1 else format_count(len(jobs), "job is", "jobs are")


_SENDS_NOW: ContextVar[bool] = ContextVar("celery5_sends_now", default=False)


@contextmanager
def without_backlog() -> Generator[None]:
    """Send now or not at all while this lasts: for whoever says afterwards that a job is sent."""
    token = _SENDS_NOW.set(True)
    try:
        yield
    finally:
        _SENDS_NOW.reset(token)


Jobs = Sequence[Job]
KeyHolders = Mapping[str, str]
"""The job that has the key of each job that was not sent, by their ids."""
JobReceiver = Callable[[Jobs], None]
"""Accept jobs in place of a broker."""


class SendingApplication(ObservedApplication, Protocol):
    """The application whose jobs go out."""

    @property
    def backlog(self) -> "Backlog":
        """The jobs that wait for a broker that is unreachable."""
        ...

    @property
    def has_chosen_backlog(self) -> bool:
        """Whether the setting `backlog` is set, or there is a backlog of the application's own."""
        ...

    @property
    def publisher_check(self) -> "DeclareCheck":
        """The health checks without which nothing is published."""
        ...


class Sender:
    """Sends the jobs of one application."""

    def __init__(self, app: SendingApplication) -> None:
        self._app = app
        self._daemon = DaemonSender(app)
        self._checks: dict[int, ProcessChecks] = {}  # by process id: a forked child has no thread
        self._publisher: PublishPlanner
        self._receiver: JobReceiver | None = None
        self.reset()

    def reset(self) -> None:
        """Start again with other brokers, where no queue is registered yet."""
        self._publisher = PublishPlanner(keys=self._app.keys)

    def redirect(self, receiver: JobReceiver | None) -> JobReceiver | None:
        """Pass jobs to `receiver` from now on, or with None to brokers again. Return the previous receiver."""
        previous, self._receiver = self._receiver, receiver
        return previous

    def close(self) -> None:
        """Close the connection to the Publisher daemon, and stop the publisher checks. Both start again when needed."""
        self._daemon.close()
        checks = self._checks.pop(os.getpid(), None)
        if checks is not None:
            checks.stop()

    def queue(self, name: str) -> QueueKeys:
        """Return the keys of a queue, which are made once."""
        return self._publisher.queue(name)

    async def asend(self, jobs: Jobs, *, use_backlog: bool = True) -> KeyHolders:
        """Send jobs, and keep those in the backlog that cannot be sent now; without it send them now or not at all.

        Returns:
            Who has the key of each job that was not sent, by the ids of these jobs.
        """
        get_awaitable_colour()  # refuses before the Publisher daemon or the backlog has any of them
        if not self._app.middleware.sends:
            return await self._send(jobs, use_backlog)
        with self._app.middleware.sending(jobs) as with_headers:
            return await self._send(with_headers, use_backlog)

    def _send(self, jobs: Jobs, use_backlog: bool) -> Awaitable[KeyHolders]:
        """Return what sends jobs. Not a coroutine itself: each level of them costs a single job time."""
        if self._receiver is not None:
            return self._pass_on(self._receiver, jobs)
        parts = self._app.brokers.split_by_broker(jobs)
        if len(jobs) > 1 and self._count_wanted_replicas(jobs):
            return self._send_to_nodes(parts, use_backlog)
        if len(parts) == 1:
            return self._send_part(jobs, use_backlog)
        return _send_parts(parts, lambda part: self._send_part(part, use_backlog))

    @staticmethod
    async def _pass_on(receiver: JobReceiver, jobs: Jobs) -> KeyHolders:
        receiver(jobs)
        return {}

    async def _send_part(self, jobs: Jobs, use_backlog: bool) -> KeyHolders:
        """Send jobs that are on one broker."""
        if use_backlog and not self._app.backlog.is_idle and await self._held_up(jobs):
            return {}
        try:
            return await self.publish(jobs, direct=not use_backlog, awaits_replicas=True)
        except BrokerUnavailable as error:
            if not use_backlog:
                raise
            await self._keep(jobs, error)
            return {}

    async def publish(self, jobs: Jobs, *, direct: bool = False, awaits_replicas: bool = False) -> KeyHolders:
        """Try once to publish jobs: by the Publisher daemon, if there is one, unless it must be `direct`.

        With `awaits_replicas` it returns when these jobs have as many replicas as they or the setting demand.
        """
        if not direct:
            if self._app.settings.publisher:
                jobs = await self._daemon.send(jobs)
            elif self._app.publisher_check.known and not all(job.lock for job in jobs):
                self._raise_if_held()
        calls = self._publisher.plan_calls(jobs)
        if wanted := self._count_wanted_replicas(jobs) if awaits_replicas else 0:
            return self._publisher.record_published(jobs, await self._publish_replicated(calls, jobs, wanted))
        redis = await self._app.connections.get_async_driver()
        replies = [await redis.perform(calls[0])] if len(calls) == 1 else await redis.perform_all(calls)
        return self._publisher.record_published(jobs, replies)

    def _raise_if_held(self) -> None:
        """Raise CircuitOpen while the breaker of a publisher check is open. The first call starts the checks."""
        checks = self._checks.get(os.getpid()) or self._start_checks()
        if why := checks.why:
            raise CircuitOpen(f"nothing is published now: {why}; the setting backlog keeps jobs meanwhile")

    def _start_checks(self) -> "ProcessChecks":
        # Most producers need neither a log nor Trio.
        from celery5.logs.log import Log
        from celery5.sending.publishing_checks import ProcessChecks

        started = ProcessChecks(
            checks=list(self._app.publisher_check.known.values()),
            keys=self._app.keys,
            log=Log(worker=f"producer-{os.getpid()}", app=self._app.name),
        )
        kept = self._checks.setdefault(os.getpid(), started)
        if kept is not started:  # another thread was faster
            started.stop()
        return kept

    async def _held_up(self, jobs: Jobs) -> bool:
        """Keep jobs in the backlog if earlier jobs of their queues wait there; return whether that is so."""
        backlog = self._app.backlog
        if backlog.is_to_be_opened:
            await run_in_thread(backlog.open)
        if not backlog.has_earlier_jobs(jobs) or not self._uses_backlog(jobs):
            return False
        await self._keep(jobs, None)
        return True

    async def _keep(self, jobs: Jobs, error: BrokerUnavailable | None) -> None:
        """Keep jobs that could not be sent. Raises `error` when there is no backlog, and BacklogFull."""
        settings, backlog = self._app.settings, self._app.backlog
        if error is not None and not self._uses_backlog(jobs):
            raise error
        keep = partial(backlog.keep, jobs, error, limit=settings.backlog, max_bytes=settings.backlog_bytes)
        if backlog.own is None:
            keep()
        else:
            await run_in_thread(keep)

    def _uses_backlog(self, jobs: Jobs) -> bool:
        """Return whether these jobs of this caller may wait in the backlog.

        Where somebody relies on more than a process's memory, only if somebody has asked for that: in a running job or
        processor, since that runs again when it cannot send, and the memory of its worker does not; and with a
        Publisher daemon or `replicas`, which store a job safely before sending returns.
        """
        settings = self._app.settings
        if _SENDS_NOW.get() or not settings.backlog:
            return False
        is_at_work = CURRENT_JOB.get() is not None or CURRENT_PARTITION.get() is not None
        relies_on_more = is_at_work or settings.publisher or self._count_wanted_replicas(jobs)
        return not relies_on_more or self._app.has_chosen_backlog

    async def _send_to_nodes(self, parts: Sequence[Jobs], use_backlog: bool) -> KeyHolders:
        """Send jobs, of one broker each part, so that replicas can be waited for."""
        parts = [part for jobs_of_broker in parts for part in await self._split_by_node(jobs_of_broker)]
        return await _send_parts(parts, lambda part: self._send_part(part, use_backlog))

    async def _split_by_node(self, jobs: Jobs) -> list[Jobs]:
        """Split jobs of one broker so that one server has all of each part: in a cluster, by their queues."""
        by_queue: dict[str, list[Job]] = {}
        for job in jobs:
            by_queue.setdefault(job.queue, []).append(job)
        connections = self._app.brokers.get(self._app.brokers.broker_of_queue(jobs[0].queue))
        if len(by_queue) > 1 and await run_in_thread(connections.is_known_as_server):
            return [jobs]
        return list(by_queue.values())

    def _count_wanted_replicas(self, jobs: Jobs) -> int:
        """Return how many replicas must have the jobs: the most that one of them, or else the setting, demands."""
        default = self._app.settings.replicas
        return max((default if job.replicas is UNSET else job.replicas for job in jobs), default=0)

    async def _publish_replicated(self, calls: Sequence[Call[Any]], jobs: Jobs, wanted: int) -> list[Any]:
        """Publish jobs, which are on one broker, and return the replies when so many replicas have them."""
        app, keys = self._app, self.queue(jobs[0].queue)
        connections = app.brokers.get(app.brokers.broker_of_queue(jobs[0].queue))
        # With the blocking driver in every colour: it has a connection for each thread, which WAIT needs.
        return await run_in_thread(
            lambda: publish_replicated(connections.get_blocking_driver(), keys, calls, jobs, wanted=wanted)
        )


def without_traceback(error: BrokerUnavailable) -> BrokerUnavailable:
    """Return the same error without its traceback.

    Its message has the reason; twenty frames of connecting do not help the caller of `delay`.
    """
    if "pytest" in sys.modules and _IN_A_TEST not in getattr(error, "__notes__", ()):
        error.add_note(_IN_A_TEST)
    return error.with_traceback(None)


_IN_A_TEST = "A test needs no broker: celery5.testing.recorded(app) keeps what is sent."


async def _send_parts(parts: Sequence[Jobs], send: Callable[[Jobs], Awaitable[KeyHolders]]) -> KeyHolders:
    """Send all parts; raise the first error when all have been tried."""
    holders: dict[str, str] = {}
    first_error: Exception | None = None
    maybe_done = False
    for part in parts:
        try:
            holders.update(await send(part))
        except Exception as error:
            first_error, maybe_done = first_error or error, maybe_done or _may_have_sent(error)
        else:
            maybe_done = True
    if first_error is not None:
        raise _mark_maybe_done(first_error, maybe_done=maybe_done)
    return holders


def _may_have_sent(error: Exception) -> bool:
    return isinstance(error, BrokerError) and error.maybe_done


def _mark_maybe_done(error: Exception, *, maybe_done: bool) -> Exception:
    """Return the error of one part of the jobs, marked if other parts were sent, or may have been."""
    if maybe_done and isinstance(error, BrokerError):
        error.mark_maybe_done()
    return error
