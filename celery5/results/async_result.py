"""Result: the handle of a job that was sent, and waiting for many of them.

One connection of a process waits for however many results (F8 to F10).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from celery5.broker.call import Call
from celery5.broker.calls import commands, jobs, limits
from celery5.broker.calls.jobs import LocatedJob
from celery5.broker.coroutines import AwaitableConnections, BlockingConnections, run_blocking
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
from celery5.protocol.job.envelope import RESULT_IGNORED, Document, Failure, read_document
from celery5.protocol.job.states import JobState
from celery5.results.job_location import (
    locate_jobs,
    locate_unknown,
    wait_for_documents,
)

if TYPE_CHECKING:
    from celery5.application import Application

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")

ReturnWhen = Literal["ALL_COMPLETED", "FIRST_COMPLETED", "FIRST_EXCEPTION"]

ANY_RESULT = ResultType(Any)
"""The type of a result that nobody has declared."""
_MISSING: Any = object()


class AsyncResult(Generic[R_co]):
    """The handle of one job. `id` is the job's; keep it to make the handle again with `App.result`.

    `duplicate` says that nothing was sent: another job with the same key was in the way, and this is its handle.
    `placed` says that `queue` is the job's; if it is not, `queue` is a guess, until the job is found somewhere.
    """

    __slots__ = ("_ignored", "_type", "_value", "app", "duplicate", "id", "is_located", "queue", "task")

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
        self.app: Application = app
        self.id: str = id
        self.queue: str = queue
        self.task: str = task
        self._type = type
        self.duplicate: bool = duplicate
        self.is_located: bool = is_located
        self._ignored = ignore_result
        self._value: Any = _MISSING

    def __repr__(self) -> str:
        return f"<AsyncResult {self.id}>"

    if not TYPE_CHECKING:  # a checker knows what is there

        def __getattr__(self, name: str) -> Any:
            raise make_attribute_error("result", self, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AsyncResult) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def key(self) -> str:
        """The key that will hold the job's document."""
        return self.app.queue(self.queue).result(self.id)

    def status(self) -> JobState:
        """Return the job's state now; UNKNOWN when nothing is known of it. For plain Python."""
        return run_blocking(self._status(BlockingConnections(self.app.connections)))

    async def astatus(self) -> JobState:
        """`status`, from Trio or asyncio."""
        return await self._status(self.app.connections)

    async def _status(self, connections: AwaitableConnections) -> JobState:
        place = (await locate_jobs(await connections.get_async_driver(), [self]))[0]
        return get_job_state(place, self.app.settings.message_limit)

    def get(self, timeout: float | None = 10.0) -> R_co:
        """Wait for the job to end and return its result. For plain Python.

        Args:
            timeout: Seconds; None waits for ever. The job itself is not limited by it.

        Raises:
            TaskFailed: The job failed for good.
            ResultTimeout: It has not ended in time.
            BadResult: What it returned does not fit the task's annotation.
            ResultsDisabled: It was sent with `ignore_result`.
        """
        return run_blocking(self._get(BlockingConnections(self.app.connections), timeout))

    async def aget(self, timeout: float | None = 10.0) -> R_co:
        """`get`, from Trio or asyncio."""
        return await self._get(self.app.connections, timeout)

    async def _get(self, connections: AwaitableConnections, timeout: float | None) -> R_co:
        if self._value is _MISSING:
            self._refuse_ignored()
            found = await wait_for_documents(self.app, connections, [self], timeout=_limit(timeout))
            if self.key not in found:
                raise await self._too_late(await connections.get_async_driver(), timeout)
            self._value = self._unpack(found[self.key])
        return cast("R_co", self._value)

    def forget(self) -> None:
        """Delete the stored result. `get` will not find it any more. For plain Python."""
        run_blocking(self._forget(BlockingConnections(self.app.connections)))

    async def aforget(self) -> None:
        """`forget`, from Trio or asyncio."""
        await self._forget(self.app.connections)

    async def _forget(self, connections: AwaitableConnections) -> None:
        redis = await connections.get_async_driver()
        await locate_unknown(connections, [self])
        await redis.perform(jobs.delete_results(self.app.queue(self.queue), [self.id]))

    def revoke(self) -> bool:
        """Have the job not run, or stop if it runs (C107). It holds, whatever workers there are now or later.

        True when the job will not run any more or is being told to stop: it is EXECUTING until its worker has let go
        of it. False when it had ended before, or nothing is known of it. `get` raises TaskRevoked for a revoked job.
        """
        return revoke([self])[0]

    async def arevoke(self) -> bool:
        """`revoke`, from Trio or asyncio."""
        return (await arevoke([self]))[0]

    def outcome(self, raw: bytes) -> "R_co | Exception":
        """What `get` would give or raise for the document `raw`."""
        try:
            return cast("R_co", self._unpack(raw))
        except (TaskFailed, BadResult, Corrupt, ResultsDisabled) as failed:
            return failed

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
        """Return why a job has not begun, as far as one trip to the broker shows; '' when no reason is known."""
        keys, asked = self.app.keys, list[Call[Any]]()
        asked += [
            jobs.get_queue_state(self.app.queue(self.queue)),
            commands.list_paused_queues(keys),
            limits.list_overrides(keys),
        ]
        try:
            overview, paused, imposed = await redis.perform_all(asked)
        except BrokerError:
            return ""  # the job's state was read; the reason is an extra
        suspension = imposed.suspended.get(self.task)
        reasons = (
            "the queue is paused" if self.queue in paused else "",
            "no worker reads it" if not any(each.alive for each in overview.workers) else "",
            f"the task is suspended{suspension.why and f' ({suspension.why})'}" if suspension else "",
        )
        known = ", ".join(filter(None, reasons))
        return f": {known}" if known else ""


_WAITING = frozenset({JobState.SENT, JobState.HELD, JobState.SCHEDULED, JobState.RETRY})


def get_job_state(place: LocatedJob, limit: int | None = None) -> JobState:
    """The state that a place means. `limit` is the setting `message_limit`."""
    if place.state == "ENDED":
        return JobState(read_document(place.document, limit).state)
    return JobState(place.state)


def make_task_error(document: Document) -> TaskFailed:
    """The error that tells of a job that did not succeed."""
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


def gather(
    results: Iterable[AsyncResult[R]], *, timeout: float | None = 10.0, return_exceptions: bool = True
) -> "list[R | Exception]":
    """The results of all jobs, in order, waiting once for all of them.

    `timeout`, in seconds, is for the whole. A failed job stands as its TaskFailed, a late one as its ResultTimeout;
    with `return_exceptions=False` the first of these is raised instead. The default is Fennel's (F9).
    """
    listed = _handles(results, "gather")
    if not listed:
        return []
    connections = BlockingConnections(_app_of(listed).connections)
    return run_blocking(_gather(connections, listed, timeout, return_exceptions))


async def agather(
    results: Iterable[AsyncResult[R]],
    *,
    timeout: float | None = 10.0,
    return_exceptions: bool = True,
) -> "list[R | Exception]":
    """`gather`, from Trio or asyncio."""
    listed = _handles(results, "agather")
    if not listed:
        return []
    return await _gather(_app_of(listed).connections, listed, timeout, return_exceptions)


async def _gather(
    connections: AwaitableConnections,
    listed: list[AsyncResult[R]],
    timeout: float | None,
    return_exceptions: bool,
) -> "list[R | Exception]":
    found = await wait_for_documents(_app_of(listed), connections, listed, timeout=_limit(timeout))
    return _in_order(listed, found, timeout, return_exceptions)


def wait(
    results: Iterable[AsyncResult[Any]],
    *,
    timeout: float | None = None,
    return_when: ReturnWhen = "ALL_COMPLETED",
) -> tuple[set[AsyncResult[Any]], set[AsyncResult[Any]]]:
    """The jobs that have ended and those that have not, once all (or the first, or the first failed) have (F10)."""
    listed = _handles(results, "wait")
    if not listed:
        return set(), set()
    connections = BlockingConnections(_app_of(listed).connections)
    return run_blocking(_wait(connections, listed, timeout, return_when))


async def wait_async(
    results: Iterable[AsyncResult[Any]],
    *,
    timeout: float | None = None,
    return_when: ReturnWhen = "ALL_COMPLETED",
) -> tuple[set[AsyncResult[Any]], set[AsyncResult[Any]]]:
    """`wait`, from Trio or asyncio."""
    listed = _handles(results, "wait_async")
    if not listed:
        return set(), set()
    return await _wait(_app_of(listed).connections, listed, timeout, return_when)


async def _wait(
    connections: AwaitableConnections,
    listed: list[AsyncResult[Any]],
    timeout: float | None,
    return_when: ReturnWhen,
) -> tuple[set[AsyncResult[Any]], set[AsyncResult[Any]]]:
    app = _app_of(listed)
    enough = _enough(return_when, app.settings.message_limit)
    found = await wait_for_documents(app, connections, listed, timeout=_limit(timeout), enough=enough)
    return _parted(listed, found)


def revoke(results: Iterable[AsyncResult[Any]]) -> list[bool]:
    """Revoke many jobs in few round trips; gives, in order, what `AsyncResult.revoke` gives for each."""
    listed = _handles(results, "revoke")
    if not listed:
        return []
    return run_blocking(_revoke(BlockingConnections(_app_of(listed).connections), listed))


async def arevoke(results: Iterable[AsyncResult[Any]]) -> list[bool]:
    """`revoke`, from Trio or asyncio."""
    listed = _handles(results, "arevoke")
    if not listed:
        return []
    return await _revoke(_app_of(listed).connections, listed)


async def _revoke(connections: AwaitableConnections, listed: list[AsyncResult[Any]]) -> list[bool]:
    redis = await connections.get_async_driver()
    await locate_unknown(connections, listed)
    trips = _revocations(listed)
    return _revoked(listed, await redis.perform_all([call for call, _ in trips]), trips)


def _handles(results: object, what: str) -> list[AsyncResult[Any]]:
    """The handles that `what` is given. Raises TypeError for anything else."""
    if isinstance(results, AsyncResult | str | bytes) or not isinstance(results, Iterable):
        raise TypeError(f"{what} takes a list of handles, got {results!r}: write {what}([result])")
    listed = list(cast("Iterable[Any]", results))
    for each in listed:
        if not isinstance(each, AsyncResult):
            raise TypeError(f"{what} takes handles of jobs, got {each!r}; app.result(id) makes one of an id")
    return listed


def _limit(timeout: object) -> float | None:
    """Seconds to wait. Raises TypeError for what is no number."""
    if timeout is None or (isinstance(timeout, int | float) and not isinstance(timeout, bool)):
        return timeout
    raise TypeError(f"timeout is {timeout!r}: give seconds, or None to wait for ever")


def _revocations(results: Sequence[AsyncResult[Any]]) -> list[tuple[Call[list[str]], Sequence[str]]]:
    """The trips that revoke these jobs, each with their keys."""
    by_queue: dict[str, dict[str, str]] = {}
    for each in results:
        by_queue.setdefault(each.queue, {})[each.id] = each.key
    app, trips = _app_of(results), list[tuple[Call[list[str]], Sequence[str]]]()
    for queue, keys in by_queue.items():
        ids = list(keys)
        for at in range(0, len(ids), jobs.REVOCATION_BATCH):
            some = ids[at : at + jobs.REVOCATION_BATCH]
            call = jobs.revoke(app.queue(queue), some, ttl=app.settings.results_ttl)
            trips.append((call, [keys[each] for each in some]))
    return trips


def _revoked(
    results: Sequence[AsyncResult[Any]],
    answers: Sequence[Sequence[str]],
    trips: Sequence[tuple[Call[list[str]], Sequence[str]]],
) -> list[bool]:
    found: dict[str, str] = {}
    for (_call, keys), states in zip(trips, answers, strict=True):
        found.update(zip(keys, states, strict=True))
    return [found[each.key] in (JobState.REVOKED, JobState.EXECUTING) for each in results]


def _app_of(results: Sequence[AsyncResult[Any]]) -> "Application":
    if any(each.app is not results[0].app for each in results):
        raise Misconfigured(
            "these are results of several applications: wait for each application's by themselves"
        )
    return results[0].app


def _in_order(
    results: Sequence[AsyncResult[R]],
    found: Mapping[str, bytes],
    timeout: float | None,
    return_exceptions: bool,
) -> "list[R | Exception]":
    values: list[R | Exception] = []
    for each in results:
        raw = found.get(each.key)
        late = ResultTimeout(f"{each.task}[{each.id}]: no result after {timeout} s") if raw is None else None
        value = late or each.outcome(cast("bytes", raw))
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
        return lambda found: any(
            read_document(raw, limit).state != JobState.SUCCESS for raw in found.values()
        )
    return None


def _parted(
    results: Sequence[AsyncResult[Any]], found: Mapping[str, bytes]
) -> tuple[set[AsyncResult[Any]], set[AsyncResult[Any]]]:
    done = {each for each in results if each.key in found}
    return done, set(results) - done
