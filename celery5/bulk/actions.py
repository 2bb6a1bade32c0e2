"""Count, list, follow and stop bulk actions: `app.bulk`."""

import builtins
import math
import time
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from celery5.application import Application
from celery5.audit.actor import acting, get_actor_name
from celery5.audit.recording import AuditedAction
from celery5.broker.call import Call
from celery5.broker.calls import bulk as calls
from celery5.broker.colour import AwaitableConnections, blocking
from celery5.broker.driver import AsyncDriver
from celery5.bulk.operations import make_operation
from celery5.errors import Misconfigured
from celery5.protocol.audit import SOURCES, AuditSource
from celery5.protocol.bulk import (
    DONE,
    MAX_COUNTED,
    STOPPED,
    BulkRequest,
    BulkStatus,
    check_bulk_action,
    list_texts,
    parse_status,
)

STATUSES_AT_ONCE = 50
"""Actions that are read in one trip."""


class BulkCount(NamedTuple):
    """How many jobs or runs a bulk action would select; at least this many when it `is_exact` is false."""

    total: int
    is_exact: bool


class Bulk:
    """The bulk actions of an application: `app.bulk`. They are kept for a day after their last change.

    An action is performed by a `BulkPerformer`, a service that a process of the cluster runs.
    """

    REACHED_AS: ClassVar[str] = "app.bulk."

    def __init__(self, app: Application) -> None:
        self._app = app

    async def acount(self, action: BulkRequest) -> BulkCount:
        """Return how many jobs or runs an action would select: at most 100,000 are looked at.

        Raises:
            Misconfigured: The action makes no sense.
            UnknownQueue: There is no such queue.
        """
        return await count_selected(self._app, self._app.connections, action)

    @blocking(acount)
    def count(self) -> None: ...

    async def alist(self, *, limit: int = 100) -> builtins.list[BulkStatus]:
        """Return actions, the newest first: at most `limit`."""
        if limit < 1:
            raise Misconfigured(f"limit is {limit!r}: give 1 or more")
        redis = await self._app.connections.get_async_driver()
        ids = await redis.perform(calls.list_actions(self._app.keys, count=limit))
        found: list[BulkStatus] = []
        for start in range(0, len(ids), STATUSES_AT_ONCE):
            found += await read_statuses(self._app, redis, ids[start : start + STATUSES_AT_ONCE])
        return found

    @blocking(alist)
    def list(self) -> None: ...

    async def aget(self, action_id: str) -> BulkStatus | None:
        """Return the state and the progress of an action; None when it is not known."""
        redis = await self._app.connections.get_async_driver()
        return next(iter(await read_statuses(self._app, redis, [action_id])), None)

    @blocking(aget)
    def get(self) -> None: ...

    async def astop(self, action_id: str) -> bool:
        """Stop an action; return whether it had not ended. What is done stays done."""
        redis = await self._app.connections.get_async_driver()
        reply = await redis.perform(calls.stop_action(self._app.keys, action_id, get_actor_name()))
        if reply == calls.STOPPED_NOW:  # no process performs it, so none records it
            for status in await read_statuses(self._app, redis, [action_id]):
                await record_outcome(self._app, redis, status)
        return reply != calls.NOT_STOPPED

    @blocking(astop)
    def stop(self) -> None: ...


async def read_statuses(app: Application, redis: AsyncDriver, ids: Sequence[str]) -> list[BulkStatus]:
    """Return what is known of actions, in order."""
    reads: list[Call[Any]] = [calls.has_lease(app.keys, action_id) for action_id in ids]
    reads += [calls.read_action(app.keys, action_id) for action_id in ids]
    replies: list[Any] = await redis.perform_all(reads) if reads else []
    holders, stored = replies[: len(ids)], replies[len(ids) :]
    statuses = [
        parse_status(action_id, fields, has_lease=bool(holder))
        for action_id, holder, fields in zip(ids, holders, stored, strict=True)
    ]
    return [status for status in statuses if status is not None]


async def count_selected(
    app: Application,
    connections: AwaitableConnections,
    action: BulkRequest,
    *,
    elapsed: float = 0.0,
    within: float = math.inf,
) -> BulkCount:
    """Return how many jobs or runs an action selects.

    Args:
        app: The application.
        connections: Its connections, for the colour of the caller.
        action: What selects them.
        elapsed: Seconds since the action was asked for.
        within: Seconds to count for, at most.
    """
    redis = await connections.get_async_driver()
    operation = make_operation(app, connections, redis, check_bulk_action(action), elapsed=elapsed)
    total, deadline = 0, time.monotonic() + within
    while operation.looked_at < MAX_COUNTED and time.monotonic() < deadline:
        page = await operation.read_page()
        if page is None:
            return BulkCount(total, is_exact=True)
        total += len(page)
    return BulkCount(total, is_exact=False)


async def record_outcome(app: Application, redis: AsyncDriver, status: BulkStatus) -> None:
    """Write the entry in the audit trail of an action that has ended, in the name of who asked for it."""
    selection = {name: value for name, value in status.action.filter.items() if name != "queue"}
    target = ", ".join(list_texts(status.action.filter, "queue")) or "all queues"
    how = {**selection, "rate": status.action.rate, "bulk": status.id}
    source: AuditSource = status.source if status.source in SOURCES else "python"
    dry_run = status.action.dry_run
    with acting(status.who, source):
        async with AuditedAction(app, redis, status.action.verb, target, how, dry_run=dry_run) as entry:
            entry.set_count(status.progress.done)
            if status.state == STOPPED:
                entry.set_interruption(f"stopped by {status.stopped_by}")
            elif status.state != DONE:
                entry.set_failure(status.progress.error or f"it is {status.state}")
