"""Sending: how an application's jobs get to their brokers, at once or by the backlog.

Floor: domain. Reads: nothing. Writes: what the Publisher's calls say; the backlog.

With several brokers the jobs for each go by themselves: one that is away holds up nobody else's.
"""

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from celery5.broker.in_thread import in_thread
from celery5.broker.keys import QueueKeys
from celery5.errors import BrokerError, BrokerUnavailable
from celery5.handing import Daemon
from celery5.protocol.job import Job
from celery5.publisher import Publisher

if TYPE_CHECKING:
    from celery5.app import App

Jobs = Sequence[Job]
Holders = Mapping[str, str]
"""Whose place each job has that was not sent, by their ids."""
Taker = Callable[[Jobs], None]
"""Accept jobs in place of a broker."""


class Sender:
    """Where one application's jobs go out."""

    def __init__(self, app: "App") -> None:
        self._app = app
        self._daemon = Daemon(app)
        self._publisher: Publisher
        self._taker: Taker | None = None
        self.begin()

    def begin(self) -> None:
        """Begin anew, with other brokers: they have not heard of any queue."""
        self._publisher = Publisher(keys=self._app.keys)

    def divert(self, taker: Taker | None) -> Taker | None:
        """Give jobs to `taker` from now on, or with None to brokers again. Return the taker before."""
        before, self._taker = self._taker, taker
        return before

    def close(self) -> None:
        """Close the connection to the Publisher daemon, if there is one. It opens again when needed."""
        self._daemon.close()

    def queue(self, name: str) -> QueueKeys:
        """The keys of a queue, made once."""
        return self._publisher.queue(name)

    def dispatch(self, jobs: Jobs, instead: str) -> Holders:
        """Send jobs, now or by the backlog; gives whose place each of those has that were not sent, by their ids."""
        app = self._app
        app.connections.blocking(instead=instead)  # or raise before anything is kept
        if self._taker is not None:
            self._taker(jobs)
            return {}
        if len(jobs) > 1 and len(parts := app.brokers.parts(jobs)) > 1:
            return _each_of(parts, lambda part: self.dispatch(part, instead))
        if self._held_up(jobs):
            return {}
        try:
            holders = self.publish(jobs, instead)
        except BrokerUnavailable as error:
            self._keep(jobs, error)
            return {}
        self._assure(jobs)
        return holders

    async def adispatch(self, jobs: Jobs) -> Holders:
        """`dispatch`, from Trio or asyncio."""
        if self._taker is not None:
            self._taker(jobs)
            return {}
        if len(jobs) > 1 and len(parts := self._app.brokers.parts(jobs)) > 1:
            return await _aeach_of(parts, self.adispatch)
        if self._held_up(jobs):
            return {}
        try:
            holders = await self.apublish(jobs)
        except BrokerUnavailable as error:
            self._keep(jobs, error)
            return {}
        await self._aassure(jobs)
        return holders

    def send(self, jobs: Jobs, instead: str) -> Holders:
        """Send jobs now or not at all."""
        if self._taker is not None:
            return self.dispatch(jobs, instead)

        def send(part: Jobs) -> Holders:
            holders = self.publish(part, instead, direct=True)
            self._assure(part)
            return holders

        return _each_of(self._app.brokers.parts(jobs), send)

    async def asend(self, jobs: Jobs) -> Holders:
        """`send`, from Trio or asyncio."""
        if self._taker is not None:
            return await self.adispatch(jobs)

        async def send(part: Jobs) -> Holders:
            holders = await self.apublish(part, direct=True)
            await self._aassure(part)
            return holders

        return await _aeach_of(self._app.brokers.parts(jobs), send)

    def publish(self, jobs: Jobs, instead: str = "asend_many", *, direct: bool = False) -> Holders:
        """One attempt, in plain Python: by the Publisher daemon, if there is one, unless it must be `direct`."""
        if self._app.settings.publisher and not direct:
            jobs = self._daemon.hand(jobs)
        redis = self._app.connections.blocking(instead=instead)
        return self._publisher.published(jobs, redis.perform_all(self._publisher.publish(jobs)))

    async def apublish(self, jobs: Jobs, *, direct: bool = False) -> Holders:
        """`publish`, from Trio or asyncio."""
        if self._app.settings.publisher and not direct:
            jobs = await self._daemon.ahand(jobs)
        redis = await self._app.connections.awaiting()
        return self._publisher.published(jobs, await redis.perform_all(self._publisher.publish(jobs)))

    def _held_up(self, jobs: Jobs) -> bool:
        """Whether earlier jobs of the same queues wait in the backlog, where these do, too, from now on."""
        backlog = self._app.backlog
        if not backlog.holds_up(jobs):
            return False
        backlog.keep(jobs, None, limit=self._app.settings.backlog)
        return True

    def _keep(self, jobs: Jobs, error: BrokerUnavailable) -> None:
        """Keep what could not be sent. Raises `error` when there is no backlog, and BacklogFull."""
        limit = self._app.settings.backlog
        if not limit:
            raise error
        self._app.backlog.keep(jobs, error, limit=limit)

    def _assure(self, jobs: Jobs) -> None:
        """Return when as many replicas as the setting asks for have the jobs, which are on one broker."""
        app = self._app
        if app.settings.replicas and jobs:
            from celery5.replicas import assure

            redis = app.brokers.of(app.brokers.home(jobs[0].queue)).blocking(instead="asend_many")
            assure(redis, self.queue(jobs[0].queue), jobs, wanted=app.settings.replicas)

    async def _aassure(self, jobs: Jobs) -> None:
        if self._app.settings.replicas and jobs:
            await in_thread(lambda: self._assure(jobs))


def in_short(error: BrokerUnavailable) -> BrokerUnavailable:
    """Return the same error without its traceback. Its message has the reason, and twenty frames of
    connecting do not help the caller of `delay`."""
    if "pytest" in sys.modules and _IN_A_TEST not in getattr(error, "__notes__", ()):
        error.add_note(_IN_A_TEST)
    return error.with_traceback(None)


_IN_A_TEST = "A test needs no broker: celery5.testing.recorded(app) keeps what is sent."


def _each_of(parts: Sequence[Jobs], send: Callable[[Jobs], Holders]) -> Holders:
    """Send all parts, and raise the first error when all have been tried."""
    holders: dict[str, str] = {}
    failed: Exception | None = None
    maybe_done = False
    for part in parts:
        try:
            holders.update(send(part))
        except Exception as error:
            failed, maybe_done = failed or error, maybe_done or _may_have_sent(error)
        else:
            maybe_done = True
    if failed is not None:
        raise _marked(failed, maybe_done=maybe_done)
    return holders


async def _aeach_of(parts: Sequence[Jobs], send: Callable[[Jobs], Awaitable[Holders]]) -> Holders:
    holders: dict[str, str] = {}
    failed: Exception | None = None
    maybe_done = False
    for part in parts:
        try:
            holders.update(await send(part))
        except Exception as error:
            failed, maybe_done = failed or error, maybe_done or _may_have_sent(error)
        else:
            maybe_done = True
    if failed is not None:
        raise _marked(failed, maybe_done=maybe_done)
    return holders


def _may_have_sent(error: Exception) -> bool:
    return isinstance(error, BrokerError) and error.maybe_done


def _marked(error: Exception, *, maybe_done: bool) -> Exception:
    """The error of one part of the jobs, which says when other parts were sent, or may have been."""
    if maybe_done and isinstance(error, BrokerError):
        error.mark_maybe_done()
    return error
