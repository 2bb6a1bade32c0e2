"""Read the audit trail of an application, and say who acts: `app.audit`."""

import builtins
import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, ClassVar, cast

from celery5.audit.actor import acting
from celery5.audit.recording import record_sending
from celery5.broker.calls import audit
from celery5.broker.colour import blocking
from celery5.broker.driver import AsyncDriver
from celery5.errors import Misconfigured
from celery5.protocol.audit import (
    ACTIONS,
    MAX_WHO,
    PROCESS_NOUNS,
    SOURCES,
    AuditEntry,
    AuditSource,
    is_action,
    is_entry_id,
    is_of_action,
)
from celery5.similar_names import did_you_mean

if TYPE_CHECKING:
    from celery5.application import Application

ENTRIES_PER_CALL = 500
"""Entries that are read in one trip."""


class Audit:
    """The audit trail of an application: `app.audit`.

    It is on the default broker, has about the last 10,000 actions, and stays for 90 days after the last one.
    """

    REACHED_AS: ClassVar[str] = "app.audit."

    def __init__(self, app: "Application") -> None:
        self._app = app

    @contextmanager
    def acting_as(self, who: str, *, source: AuditSource = "python") -> Generator[None, None, None]:
        """Record the actions within this block as those of somebody else than the user of this process.

        Args:
            who: A name, such as that of the user who is signed in.
            source: What they came from: `python`, `cli` or `dashboard`.

        Raises:
            Misconfigured: `who` is empty or too long, or there is no such source.
        """
        if not isinstance(cast("object", who), str) or not 0 < len(who.strip()) <= MAX_WHO:
            raise Misconfigured(f"acting_as: who is {who!r}: give a name of 1 to {MAX_WHO} characters")
        if source not in SOURCES:
            raise Misconfigured(f"acting_as: source is {source!r}: give one of {', '.join(SOURCES)}")
        with acting(who, source):
            yield

    async def alist(
        self,
        *,
        limit: int = 100,
        action: str = "",
        who: str = "",
        since: float | datetime | None = None,
        before: str = "",
    ) -> builtins.list[AuditEntry]:
        """Return actions, the newest first.

        Args:
            limit: How many at most.
            action: This one alone, such as `dlq:replay`; or those of a noun: `dlq`.
            who: Those of this person alone: a whole name, or the part before the `@`.
            since: Those since this time: a datetime with a zone, or seconds since 1970.
            before: Those older than the entry with this id: the last one of the page before.

        Raises:
            Misconfigured: An argument makes no sense.
            BrokerError: The default broker cannot be reached, or refuses.
        """
        since_ms = _check(limit, since, before)
        redis = await self._app.connections.get_async_driver()
        entries = await _list(self._app, redis, limit, action, who, since_ms, before)
        if not entries:
            _check_action(action)  # one that has entries is there, whoever has written them
        return entries

    @blocking(alist)
    def list(self) -> None: ...

    async def arecord_sending(
        self, action: str, target: str, how: Mapping[str, object] | None = None, *, count: int = 1
    ) -> None:
        """Record that a person has sent something.

        Commands and pages do so. What programs send has no entry: it would cost each job a second request.

        Args:
            action: `task:send`, `event:send`, `stream:send` or `alert:test`.
            target: What was sent, or where to: a task, an event, a stream.
            how: More on it. What is empty is left out.
            count: How many were sent.
        """
        redis = await self._app.connections.get_async_driver()
        await record_sending(self._app, redis, action, target, how, count=count)

    @blocking(arecord_sending)
    def record_sending(self) -> None: ...


def _check_action(action: str) -> None:
    """Raise Misconfigured for a name that no action has."""
    nouns = {*(name.partition(":")[0] for name in ACTIONS), *PROCESS_NOUNS}
    if action and action not in nouns and not is_action(action):
        hint = did_you_mean(action, [*ACTIONS, *nouns], otherwise=f"nouns are {', '.join(sorted(nouns))}")
        raise Misconfigured(f"no action {action!r}; {hint}")


def _check(limit: object, since: float | datetime | None, before: str) -> int:
    """Return the time in ms since 1970. Raises Misconfigured."""
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise Misconfigured(f"limit is {limit!r}: give 1 or more")
    if before and not is_entry_id(before):
        raise Misconfigured(f"before is {before!r}: give the id of an entry, such as 1764000000000-0")
    if since is None:
        return 0
    if isinstance(since, datetime):
        if since.tzinfo is None:
            raise Misconfigured(f"since is {since!r}: give a datetime with a zone")
        since = since.timestamp()
    number = isinstance(cast("object", since), int | float) and not isinstance(since, bool)
    if not number or not 0 <= since < math.inf:
        raise Misconfigured(f"since is {since!r}: give a datetime, or seconds since 1970")
    return int(since * 1000)


async def _list(
    app: "Application", redis: AsyncDriver, limit: int, action: str, who: str, since_ms: int, before: str
) -> list[AuditEntry]:
    chosen = list[AuditEntry]()
    while len(chosen) < limit:
        call = audit.read_actions(app.keys, before=before, since_ms=since_ms, count=ENTRIES_PER_CALL)
        entries = await redis.perform(call)
        chosen += [
            entry
            for entry in entries
            if (not action or is_of_action(entry.action, action))
            and (not who or who in (entry.who, entry.who.partition("@")[0]))
        ]
        if len(entries) < ENTRIES_PER_CALL:
            break
        before = entries[-1].id
    return chosen[:limit]
