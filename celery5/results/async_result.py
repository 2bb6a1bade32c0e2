"""The handle of a job that was sent, and functions that wait for many of them.

One connection of a process waits for any number of results.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from celery5.audit.recording import AuditedAction
from celery5.broker.call import Call
from celery5.broker.calls import commands, jobs, limits, queues
from celery5.broker.calls.jobs import LocatedJob
from celery5.broker.colour import blocking
from celery5.broker.driver import AsyncDriver
from celery5.errors import (
    BadResult,
    BrokerError,
    Corrupt,
    Misconfigured,
    ResultsDisabled,
    ResultTimeout,
    TaskExpired,
    TaskFailed,
    TaskRejected,
    TaskRevoked,
)
from celery5.hints import make_attribute_error
from celery5.protocol.job.arguments import ResultType
from celery5.protocol.job.foreign import describe_code
from celery5.protocol.job.messages import RESULT_IGNORED, Document, Failure, read_document
from celery5.protocol.job.progress import Progress
from celery5.protocol.job.states import JobState
from celery5.protocol.shards import get_queue_of_shard
from celery5.results.job_location import JobHandle, locate_jobs, locate_unknown
from celery5.results.waiting import wait_for_documents
from celery5.similar_names import join_names

if TYPE_CHECKING:
    from celery5.application import Application
    from celery5.results.watching import JobWatch

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")

ReturnWhen = Literal["ALL_COMPLETED", "FIRST_COMPLETED", "FIRST_EXCEPTION"]

ANY_RESULT = ResultType(Any)
"""The type of a result without a declared type."""
_MISSING: Any = object()


class AsyncResult(JobHandle, Generic[R_co]):
    """The handle of one job. Keep its `id` to make the handle again with `App.result`.

    If `duplicate` is true, nothing was sent: an earlier job has the same key, and this is its handle. If
    `is_located` is false, `queue` is a guess until the job is found.
    """

    __slots__ = ("_ignored", "_type", "_value", "duplicate", "task")

    def __init__(
        self,
        app: "Application",
        id: str,  # noqa: A002  the field's own name
        *,
        queue: str,
        task: str = "",
        type: ResultType = ANY_RESULT,  # noqa: A002
        ignore_result: bool = False,
        duplicate: bool = False,
        is_located: bool = True,
    ) -> None:
        super().__init__(app, id, queue, is_located=is_located)
        self.task: str = task
        self._type = type
        self.duplicate: bool = duplicate
        self._ignored = ignore_result
        self._value: Any = _MISSING

    def __repr__(self) -> str:
        return f"<AsyncResult {self.id}>"

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> Any:
            raise make_attribute_error("result", self, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AsyncResult) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    async def astatus(self) -> JobState:
        """Return the job's state now; UNKNOWN when Redis has nothing on it."""
        place = (await locate_jobs(await self.app.connections.get_async_driver(), [self]))[0]
        return get_job_state(place, self.app.settings.message_limit)

    @blocking(astatus)
    def status(self) -> None: ...

    async def aget(self, timeout: float | None = 10.0) -> R_co:
        """Wait for the job to end and return its result.

        Args:
            timeout: Seconds to wait; None for ever. The job itself is not limited by it.

        Raises:
            TaskFailed: The job failed for good.
            ResultTimeout: The job has not ended in time.
            BadResult: What the job returned does not fit the task's annotation.
            ResultsDisabled: The job was sent with `ignore_result`.
        """
        if self._value is _MISSING:
            self._refuse_ignored()
            documents = await wait_for_documents([self], timeout=_limit(timeout))
            if self.key not in documents:
                raise await self._too_late(await self.app.connections.get_async_driver(), timeout)
            self._value = self._unpack(documents[self.key])
        return cast("R_co", self._value)

    @blocking(aget)
    def get(self) -> None: ...

    async def aforget(self) -> None:
        """Delete the stored result: `get` cannot return it any more."""
        redis = await self.app.connections.get_async_driver()
        await locate_unknown(redis, [self])
        await redis.perform(jobs.delete_results(self.app.queue(self.queue), [self.id]))

    @blocking(aforget)
    def forget(self) -> None: ...

    async def aprogress(self) -> Progress | None:
        """Return what the job has last reported of its progress.

        Returns:
            None when it has reported nothing, or has ended. What an attempt has reported whose worker died may stay
            for up to five minutes, or until another attempt reports.
        """
        redis = await self.app.connections.get_async_driver()
        await locate_unknown(redis, [self])
        return await redis.perform(jobs.get_progress(self.app.queue(self.queue), self.id))

    @blocking(aprogress)
    def progress(self) -> None: ...

    def watch(self, *, timeout: float | None = 300.0, every: float = 0.5) -> "JobWatch[R_co]":
        """Return the changes of the job's state and its reports of progress, until it has ended.

        Use it with `async for` in Trio and asyncio, and with `for` in plain Python. The first update is the state now,
        the last one has the result or the error; a failed job raises nothing here. Of changes between two looks only
        the last is seen. A job is UNKNOWN as long as Redis has nothing on it.

        Args:
            timeout: Seconds for all updates together; None for ever. The job itself is not limited by it.
            every: Seconds between two looks, at most; 0.1 or more. After each change of state the first looks are
                closer together.

        Raises:
            ResultTimeout: While it is iterated: the job has not ended in time.
            BrokerUnavailable: While it is iterated: the broker could not be reached for half a minute, or at the
                first look.
            Misconfigured: `every` makes no sense.
        """
        from celery5.results.watching import JobWatch  # a worker needs none of it

        limit = _limit(timeout)
        return JobWatch(
            self,
            timeout=limit,
            every=every,
            outcome=self.outcome,
            make_timeout_error=lambda redis: self._too_late(redis, limit),
        )

    async def arevoke(self) -> bool:
        """Prevent the job from running, or stop it.

        This applies to all workers, also to those that start later. `get` raises TaskRevoked for a revoked job.

        Returns:
            True when the job will not run any more or is being stopped: it is EXECUTING until its worker has
            stopped it. False when it had ended before, or Redis has nothing on it.
        """
        return (await arevoke([self]))[0]

    @blocking(arevoke)
    def revoke(self) -> None: ...

    def outcome(self, raw: bytes) -> "R_co | Exception":
        """Return what `get` would return or raise for the document `raw`."""
        try:
            return cast("R_co", self._unpack(raw))
        except (TaskFailed, BadResult, Corrupt, ResultsDisabled) as error:
            return error

    def _unpack(self, raw: bytes) -> Any:
        document = read_document(raw, self.app.settings.message_limit)
        if document.state == JobState.SUCCESS:
            if document.reason == RESULT_IGNORED:
                self._ignored = True
                self._refuse_ignored()
            return self._decoded(document)
        raise make_task_error(document)

    def _decoded(self, document: Document) -> Any:
        try:
            return self._type.decode(document.value)
        except BadResult as error:
            raise BadResult(
                f"{document.task or self.task}[{self.id}] succeeded, but {error}; either its worker declares the task "
                "otherwise, or the task returned something else than it declares"
            ) from None

    def _refuse_ignored(self) -> None:
        if self._ignored:
            raise ResultsDisabled(
                f"{self.task}[{self.id}] was sent with ignore_result: there is no result to wait for"
            )

    async def _too_late(self, redis: AsyncDriver, timeout: float | None) -> ResultTimeout:
        state = get_job_state((await locate_jobs(redis, [self]))[0])
        where = f"on queue {self.queue!r}" if self.is_located else "on any queue"
        why = await self._why_it_waits(redis) if self.is_located and state in _WAITING else ""
        return ResultTimeout(
            f"{self.task}[{self.id}]: no result after {timeout} s; the job is {state.value} {where}{why}"
        )

    async def _why_it_waits(self, redis: AsyncDriver) -> str:
        """Return why a job has not begun, as far as one trip to the broker shows; '' if that shows nothing."""
        keys, calls = self.app.keys, list[Call[Any]]()
        calls += [
            queues.get_queue_state(self.app.queue(self.queue)),
            commands.list_paused_queues(keys),
            limits.list_overrides(keys),
        ]
        try:
            overview, paused, overrides = await redis.perform_all(calls)
        except BrokerError:
            return ""  # the job's state was read; the reason is an extra
        suspension = overrides.suspended.get(self.task)
        reasons = (
            "the queue is paused" if get_queue_of_shard(self.queue) in paused else "",
            WITHOUT_WORKER.get() if not overview.live_workers else "",
            self._explain_code(overview),
            f"the task is suspended{suspension.why and f' ({suspension.why})'}" if suspension else "",
        )
        explanation = ", ".join(filter(None, reasons))
        return f": {explanation}" if explanation else ""

    def _explain_code(self, overview: queues.QueueState) -> str:
        """Return for which code jobs of this task wait on the queue; '' if none does."""
        for counts, is_unfit in (overview.unknown, False), (overview.unfit, True):
            if self.task in counts:
                return f"it waits for {describe_code(self.task, is_unfit=is_unfit)}"
        return ""


WITHOUT_WORKER: ContextVar[str] = ContextVar("celery5_without_worker", default="no worker reads it")
"""Why a job has not begun that no worker reads, in words. The testing kit sets it, where the test runs the jobs."""
_WAITING = frozenset({JobState.SENT, JobState.HELD, JobState.SCHEDULED, JobState.RETRY})


def get_job_state(place: LocatedJob, limit: int | None = None) -> JobState:
    """Return the state of a located job. `limit` is the setting `message_limit`."""
    if place.state == "ENDED":
        return JobState(read_document(place.document, limit).state)
    return JobState(place.state)


def make_task_error(document: Document) -> TaskFailed:
    """Return the error for a job that did not succeed."""
    kind, type_ = _ENDS.get(document.state, (TaskFailed, document.state.title()))
    failure = document.failure or Failure(type=type_, message=document.reason or document.state.lower())
    return kind(
        job_id=document.id,
        task=document.task,
        type=failure.type,
        message=failure.message,
        error_args=failure.args,
        traceback=failure.traceback,
        attempt=document.attempt,
        worker=document.worker,
        reason=document.reason or document.state.lower(),
    )


_ENDS: Mapping[str, tuple[type[TaskFailed], str]] = {
    JobState.REVOKED: (TaskRevoked, "Revoked"),
    JobState.REJECTED: (TaskRejected, "Rejected"),
    JobState.EXPIRED: (TaskExpired, "Expired"),
}


async def agather(
    results: Iterable[AsyncResult[R]],
    *,
    timeout: float | None = 10.0,
    return_exceptions: bool = True,
) -> "list[R | Exception]":
    """Return the results of all jobs, in order, with a single wait for all of them.

    Args:
        timeout: Seconds to wait for all of them; None for ever.
        return_exceptions: Return a failed job as its TaskFailed, and a late one as a ResultTimeout; else raise the
            first.
    """
    handles = _handles(results, "gather")
    if not handles:
        return []
    documents = await wait_for_documents(handles, timeout=_limit(timeout))
    return _in_order(handles, documents, timeout, return_exceptions)


@blocking(agather)
def gather() -> None: ...


async def wait_async(
    results: Iterable[AsyncResult[Any]],
    *,
    timeout: float | None = None,
    return_when: ReturnWhen = "ALL_COMPLETED",
) -> tuple[set[AsyncResult[Any]], set[AsyncResult[Any]]]:
    """Wait for jobs; return those that have ended and those that have not.

    Args:
        timeout: Seconds to wait; None for ever.
        return_when: Return when all jobs have ended, when the first has ended, or when the first has failed.
    """
    handles = _handles(results, "wait")
    if not handles:
        return set(), set()
    app = handles[0].app
    enough = _enough(return_when, app.settings.message_limit)
    documents = await wait_for_documents(handles, timeout=_limit(timeout), enough=enough)
    return _parted(handles, documents)


@blocking(wait_async)
def wait() -> None: ...


async def arevoke(results: Iterable[AsyncResult[Any]]) -> list[bool]:
    """Revoke many jobs in few round trips; return, in order, what `AsyncResult.revoke` returns."""
    handles = _handles(results, "revoke")
    if not handles:
        return []
    app = handles[0].app
    redis = await app.connections.get_async_driver()
    await locate_unknown(redis, handles)
    trips = _plan_revocations(handles)
    ids = join_names(handle.id for handle in handles)
    queues = {"queue": sorted({get_queue_of_shard(handle.queue) for handle in handles})}
    routine = len(handles) == 1
    async with AuditedAction(app, redis, "task:revoke", ids, queues, is_routine=routine) as action:
        revoked = _revoked(handles, await redis.perform_all([call for call, _ in trips]), trips)
        action.set_count(sum(revoked))
        return revoked


@blocking(arevoke)
def revoke() -> None: ...


def _handles(results: object, what: str) -> list[AsyncResult[Any]]:
    """Return the handles that `what` was called with. Raises TypeError for anything else.

    Raises Misconfigured when they are of several applications.
    """
    if isinstance(results, AsyncResult | str | bytes) or not isinstance(results, Iterable):
        raise TypeError(f"{what} takes a list of handles, got {results!r}: write {what}([result])")
    handles = list(cast("Iterable[Any]", results))
    for handle in handles:
        if not isinstance(handle, AsyncResult):
            raise TypeError(
                f"{what} takes handles of jobs, got {handle!r}; app.result(id) makes one of an id"
            )
    if any(handle.app is not handles[0].app for handle in handles):
        raise Misconfigured(
            "these are results of several applications: wait for each application's by themselves"
        )
    return handles


def _limit(timeout: object) -> float | None:
    """Return a timeout in seconds. Raises TypeError for anything else than a number or None."""
    if timeout is None or (isinstance(timeout, int | float) and not isinstance(timeout, bool)):
        return timeout
    raise TypeError(f"timeout is {timeout!r}: give seconds, or None to wait for ever")


def _plan_revocations(results: Sequence[AsyncResult[Any]]) -> list[tuple[Call[list[str]], Sequence[str]]]:
    """Return the calls that revoke these jobs, each with their keys."""
    by_queue: dict[str, dict[str, str]] = {}
    for result in results:
        by_queue.setdefault(result.queue, {})[result.id] = result.key
    app, trips = results[0].app, list[tuple[Call[list[str]], Sequence[str]]]()
    for queue, keys in by_queue.items():
        ids = list(keys)
        for start in range(0, len(ids), jobs.REVOCATION_BATCH):
            batch = ids[start : start + jobs.REVOCATION_BATCH]
            call = jobs.revoke(app.queue(queue), batch, ttl=app.settings.results_ttl)
            trips.append((call, [keys[job_id] for job_id in batch]))
    return trips


def _revoked(
    results: Sequence[AsyncResult[Any]],
    answers: Sequence[Sequence[str]],
    trips: Sequence[tuple[Call[list[str]], Sequence[str]]],
) -> list[bool]:
    state_by_key: dict[str, str] = {}
    for (_call, keys), states in zip(trips, answers, strict=True):
        state_by_key.update(zip(keys, states, strict=True))
    return [state_by_key[result.key] in (JobState.REVOKED, JobState.EXECUTING) for result in results]


def _in_order(
    results: Sequence[AsyncResult[R]],
    documents: Mapping[str, bytes],
    timeout: float | None,
    return_exceptions: bool,
) -> "list[R | Exception]":
    values: list[R | Exception] = []
    for result in results:
        raw = documents.get(result.key)
        timeout_error = (
            ResultTimeout(f"{result.task}[{result.id}]: no result after {timeout} s") if raw is None else None
        )
        value = timeout_error or result.outcome(cast("bytes", raw))
        if isinstance(value, Exception) and not return_exceptions:
            raise value
        values.append(value)
    return values


def _enough(
    return_when: ReturnWhen, limit: int | None = None
) -> Callable[[Mapping[str, bytes]], bool] | None:
    if return_when == "FIRST_COMPLETED":
        return bool
    if return_when not in ("ALL_COMPLETED", "FIRST_EXCEPTION"):
        raise Misconfigured(
            f"return_when is {return_when!r}: use ALL_COMPLETED, FIRST_COMPLETED or FIRST_EXCEPTION"
        )
    if return_when == "FIRST_EXCEPTION":
        return lambda documents: any(
            read_document(raw, limit).state != JobState.SUCCESS for raw in documents.values()
        )
    return None


def _parted(
    results: Sequence[AsyncResult[Any]], documents: Mapping[str, bytes]
) -> tuple[set[AsyncResult[Any]], set[AsyncResult[Any]]]:
    done = {result for result in results if result.key in documents}
    return done, set(results) - done
