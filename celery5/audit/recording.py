"""Record actions: what changes something at runtime is done within an `AuditedAction`.

The entry is written after the action, with what came of it. An action never fails because of its entry: when this
cannot be written, a warning is logged, and the action stands. An action on a broker that is unreachable has no entry.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from celery5.audit.actor import get_actor, get_user
from celery5.broker.call import Call
from celery5.broker.calls import audit
from celery5.broker.colour import current_colour
from celery5.broker.driver import AsyncDriver
from celery5.errors import BrokerUnavailable, NotRecorded
from celery5.logs.fence import FENCE
from celery5.protocol.audit import DONE, AuditEntry, is_action
from celery5.protocol.masking import describe_error
from celery5.runners.context import CURRENT_JOB, LOG_EVENT

if TYPE_CHECKING:
    from celery5.application import Application

T = TypeVar("T")

_NOTED: ContextVar[list[str] | None] = ContextVar("celery5_noted_actions", default=None)

WRITE_TIMEOUT = 2.0
"""Seconds that the entry may take in an event loop."""


class AuditedAction:
    """One action: `async with AuditedAction(app, redis, "queue:purge", queue) as action: ...`.

    It is used in coroutines that are written once for each colour.

    Args:
        app: The application.
        redis: The driver that performs the action.
        name: A noun and a verb of the command line, one of `ACTIONS` or that of a control command.
        target: What it is done to.
        filter: What selects a part of the target, and how it is done. What is empty is left out.
        dry_run: Nothing is changed, so there is no entry.
        is_routine: It is done to one thing, such as a job, as programs do in the course of their work. Within a job it
            is not recorded, unless somebody else acts there: it would cost the job a second request.
    """

    def __init__(
        self,
        app: "Application",
        redis: AsyncDriver,
        name: str,
        target: str = "",
        filter: Mapping[str, Any] | None = None,  # noqa: A002  the entry's own word
        *,
        dry_run: bool = False,
        is_routine: bool = False,
    ) -> None:
        assert is_action(name), f"{name} is not in the list of actions"
        if (noted := _NOTED.get()) is not None:
            noted.append(name)
        self._app = app
        self._redis = redis
        self._name = name
        self._target = target
        self._filter = filter or {}
        self._dry_run = dry_run
        self._is_routine = is_routine
        self._count: int | None = None
        self._failure = ""

    def set_count(self, count: int) -> None:
        """Set how many things it has changed so far."""
        self._count = count

    def set_failure(self, why: str) -> None:
        """Set why it has failed, where nothing is raised. Raises ValueError without a reason: then it has not."""
        if not why:
            raise ValueError("an action that has failed needs a reason")
        self._failure = f"failed: {why}"

    def set_interruption(self, why: str) -> None:
        """Set why it has ended early, where nothing is raised."""
        self._failure = f"interrupted: {why}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        with FENCE("audit"):
            await self._record(error)

    async def _record(self, error: BaseException | None) -> None:
        if isinstance(error, NotRecorded):
            return  # nothing was done, and there is no broker for the entry
        if self._is_routine and CURRENT_JOB.get() is not None and not get_actor().who:
            return
        if self._dry_run or (error is None and not self._failure and self._count == 0):
            return  # nothing was changed
        if isinstance(error, BrokerUnavailable) and len(self._app.brokers.names) == 1:
            return  # nothing was done, or nobody knows; and the entry would take as long to fail
        await _write(
            self._app,
            self._redis,
            action=self._name,
            target=self._target,
            filter=self._filter,
            count=self._count,
            outcome=self._describe_outcome(error),
        )

    def _describe_outcome(self, error: BaseException | None) -> str:
        if error is not None:
            kind = "failed" if isinstance(error, Exception) else "interrupted"
            return f"{kind}: {describe_error(error)}"
        return self._failure or DONE


async def _write(app: "Application", redis: AsyncDriver, **fields: Any) -> None:
    """Write an entry. A failure is logged, and nothing else comes of it."""
    job, actor, log = CURRENT_JOB.get(), get_actor(), LOG_EVENT.get()
    entry = AuditEntry(
        id="",
        who=actor.who or get_user(),
        source=actor.source,
        job="" if job is None else job.id,
        **fields,
    )
    log(
        "audit:recorded",
        "info",
        who=entry.who,
        source=entry.source,
        action=entry.action,
        target=entry.target,
        filter={name: value for name, value in entry.filter.items() if value not in ("", None, [], ())},
        count=entry.count,
        outcome=entry.outcome,
    )
    try:
        await _perform_shielded(redis, audit.record_action(app.keys, entry))
    except Exception as failure:
        log("audit:write-failed", "warning", action=entry.action, why=str(failure))


async def _perform_shielded(redis: AsyncDriver, call: Call[str]) -> None:
    """Perform a call although the caller may be cancelled, for a short time. Raises TimeoutError and BrokerError."""
    colour = current_colour()
    if colour == "trio":
        import trio

        with trio.fail_after(WRITE_TIMEOUT, shield=True):
            await redis.perform(call)
    elif colour == "asyncio":
        import asyncio

        async with asyncio.timeout(WRITE_TIMEOUT):
            await redis.perform(call)
    else:
        await redis.perform(call)


async def perform_audited(
    app: "Application",
    redis: AsyncDriver,
    call: Call[T],
    name: str,
    target: str = "",
    filter: Mapping[str, Any] | None = None,  # noqa: A002  the entry's own word
) -> T:
    """Perform an action that is one call, and record it.

    Its count is 1 or 0 when the call returns whether it has changed anything.
    """
    async with AuditedAction(app, redis, name, target, filter) as action:
        result = await redis.perform(call)
        if isinstance(result, int):
            action.set_count(int(result))
        return result


async def record_action(
    app: "Application",
    name: str,
    target: str,
    filter: Mapping[str, Any],  # noqa: A002  the entry's own word
    *,
    count: int | None,
    failure: str,
) -> None:
    """Record an action of any name that was done, and what it has failed in; '' for nothing. Raises nothing."""
    with FENCE("audit"):
        redis = await app.connections.get_async_driver()
        outcome = f"failed: {failure}" if failure else DONE
        await _write(app, redis, action=name, target=target, filter=filter, count=count, outcome=outcome)


@contextmanager
def noting_actions() -> Generator[list[str], None, None]:
    """Note the names of the actions within this block, also of those that have no entry as nothing was changed."""
    names: list[str] = []
    token = _NOTED.set(names)
    try:
        yield names
    finally:
        _NOTED.reset(token)


async def record_sending(
    app: "Application",
    redis: AsyncDriver,
    name: str,
    target: str,
    filter: Mapping[str, Any] | None = None,  # noqa: A002  the entry's own word
    *,
    count: int = 1,
) -> None:
    """Record that a person has sent jobs, events or records, from a command or a page.

    What programs send has no entry: it would cost each job a second request.
    """
    async with AuditedAction(app, redis, name, target, filter) as action:
        action.set_count(count)
