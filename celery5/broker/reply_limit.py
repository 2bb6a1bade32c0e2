"""Bound how long the calls of one task wait for a broker that hangs: a person who looks at a page waits for them."""

import asyncio
from collections.abc import Coroutine, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from celery5.broker.call import Call
from celery5.broker.colour import current_colour
from celery5.broker.driver import AsyncDriver
from celery5.errors import BrokerUnavailable

T = TypeVar("T")


class ReplyLimit:
    """How long each call waits for its reply, and which brokers gave none: these are not waited for again.

    Args:
        seconds: How long, besides the time for which a call blocks.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # The brokers that gave no answer.
        self._silent: set[str] = set()

    async def wait(self, where: str, awaited: Coroutine[Any, Any, T], blocks: float = 0.0) -> T:
        """Return what `awaited` returns. Raises BrokerUnavailable if the broker at `where` gives no answer."""
        if where in self._silent:
            awaited.close()
            raise self._make_error(where)
        within = self._seconds + blocks
        if current_colour() == "trio":
            import trio  # an application on asyncio does not load it

            with trio.move_on_after(within):
                return await awaited
        else:
            scope = asyncio.timeout(within)
            try:
                async with scope:
                    return await awaited
            except TimeoutError:
                if not scope.expired():
                    raise
        self._silent.add(where)
        raise self._make_error(where)

    def _make_error(self, where: str) -> BrokerUnavailable:
        return BrokerUnavailable(f"broker {where} gave no answer within {self._seconds:g} s", maybe_done=True)


_LIMIT: ContextVar[ReplyLimit | None] = ContextVar("celery5_reply_limit", default=None)


@contextmanager
def limit_replies(seconds: float | None) -> Generator[None, None, None]:
    """Within this block, and in the tasks that it starts, have no call wait longer for its reply; None: as usual.

    The connection goes on, since others use it: only this call is given up. After the first one the broker is not asked
    again within the block, so that one look at ten things does not wait ten times.
    """
    token = _LIMIT.set(None if seconds is None else ReplyLimit(seconds))
    try:
        yield
    finally:
        _LIMIT.reset(token)


def get_reply_limit() -> ReplyLimit | None:
    """Return the limit of the current task; None for that of the connection."""
    return _LIMIT.get()


class LimitedDriver:
    """An AsyncDriver whose calls wait no longer than a limit allows.

    Args:
        driver: Performs the calls.
        limit: The limit.
        where: The broker.
    """

    def __init__(self, driver: AsyncDriver, limit: ReplyLimit, where: str) -> None:
        self._driver, self._limit, self._where = driver, limit, where

    async def perform(self, call: Call[T], /) -> T:
        """Perform one call and return its decoded reply."""
        return await self._limit.wait(self._where, self._driver.perform(call), call.blocks)

    async def perform_all(self, calls: Sequence[Call[T]], /) -> list[T]:
        """Perform several calls in one write; return their decoded replies in order."""
        blocks = sum(call.blocks for call in calls)
        return await self._limit.wait(self._where, self._driver.perform_all(calls), blocks)
