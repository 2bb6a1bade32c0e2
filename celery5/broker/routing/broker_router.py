"""Broker router: one driver over those of several brokers; each call goes to the broker of its key.

The keys of a queue carry its name, so every call shows by itself where it belongs. The keys of an application are on
the default broker, except those that each broker has for its own queues: calls of these go to all brokers.
"""

import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from celery5.broker.call import Call
from celery5.broker.colour import current_colour
from celery5.broker.driver import AsyncDriver, BlockingDriver
from celery5.broker.routing.unreachable import UNREACHABLE, get_unreachable
from celery5.errors import BrokerError

T = TypeVar("T")


def run_all(functions: Sequence[Callable[[], T]]) -> list[T | BrokerError]:
    """What each of them gives, or the broker's error that it raises, in plain Python: all but the last in threads.
    Any other error is raised when all have ended."""
    found: dict[int, T | Exception] = {}

    def do(at: int) -> None:
        try:
            found[at] = functions[at]()
        except Exception as error:
            found[at] = error

    threads = [
        threading.Thread(target=do, args=(at,), daemon=True, name="celery5 broker")
        for at in range(len(functions) - 1)
    ]
    for thread in threads:
        thread.start()
    do(len(functions) - 1)
    for thread in threads:
        thread.join()
    return [_value(found[at]) for at in range(len(functions))]


async def run_all_async(functions: Sequence[Callable[[], Awaitable[T]]]) -> list[T | BrokerError]:
    """`run_all`, from Trio or asyncio."""
    found: dict[int, T | Exception] = {}

    async def do(at: int) -> None:
        try:
            found[at] = await functions[at]()
        except Exception as error:
            found[at] = error

    if len(functions) == 1:
        await do(0)
    elif current_colour() == "trio":
        import trio

        async with trio.open_nursery() as nursery:
            for at in range(len(functions)):
                nursery.start_soon(do, at)
    else:
        import asyncio

        await asyncio.gather(*[do(at) for at in range(len(functions))])
    return [_value(found[at]) for at in range(len(functions))]


def _value(what: Any) -> Any:
    if isinstance(what, Exception) and not isinstance(what, BrokerError):
        raise what
    return what


ALL_BROKER_KEYS = ("queues", "paused", "limits", "suspended", "schedule-queues", "living:")
"""An application's keys that each broker has: what they say together is what is so."""
DEFAULT_BROKER_KEYS = ("living:controller", "living:publisher")
"""Of these each process is on the default broker alone: no other one need be there to command it."""
QUEUE_COMMANDS = ("SADD", "SREM")
"""Commands that change such a key for one queue, which they name: they go to that one's broker."""


class BrokerMap(NamedTuple):
    """Where keys are at home: the names of the brokers, the default one first, and on which a queue of the application
    is. What is another application's is looked for on the default one."""

    brokers: Sequence[str]
    broker_of_queue: Callable[[str], str]
    app: str

    def find_broker_of_key(self, key: str) -> str | None:
        """The broker of a key; None for all of them."""
        tag, _, rest = key.partition("}:")
        app, _, queue = tag.partition("{")[2].partition(":")
        if queue:
            return self.broker_of_queue(queue) if app == self.app else self.brokers[0]
        if rest.startswith(ALL_BROKER_KEYS) and rest not in DEFAULT_BROKER_KEYS:
            return None
        end = rest.rpartition("@")[2]  # an inbox of a process that is on another broker, and what is about it
        return end if end in self.brokers else self.brokers[0]

    def find_broker_of_call(self, call: Call[Any]) -> str | None:
        """The broker that a call goes to; None for all of them."""
        words = call.words
        if words[0] in QUEUE_COMMANDS and self.find_broker_of_key(str(words[1])) is None:
            return self.broker_of_queue(str(words[2]))
        key = words[3:4] if call.script is not None else words[1:2]
        return self.find_broker_of_key(str(key[0])) if key else self.any_reachable

    @property
    def any_reachable(self) -> str:
        """Who is asked what any of them knows, the time for instance."""
        away = get_unreachable() or {}
        return next((each for each in self.brokers if each not in away), self.brokers[0])


BrokerCalls = list[tuple[int, Call[Any]]]
"""The calls that go to one broker, each with its place among all."""


class _Trips:
    """Several calls on their way: which go where, and what came back."""

    def __init__(self, chart: BrokerMap, calls: Sequence[Call[Any]]) -> None:
        self._calls = calls
        self._answers: dict[int, list[Any]] = {}
        self._everywhere: set[int] = set()
        self._left_out = get_unreachable()
        self._error: BrokerError | None = None
        # Whether a broker failed that may have done its part.
        self._maybe_done = False
        self.parts: dict[str, BrokerCalls] = {}
        for at, call in enumerate(calls):
            broker = chart.find_broker_of_call(call)
            if broker is None:
                self._everywhere.add(at)
            for each in chart.brokers if broker is None else (broker,):
                self._plan(each, at, call)

    def _plan(self, broker: str, at: int, call: Call[Any]) -> None:
        """Nobody who was found to be away is asked again."""
        away = (self._left_out or {}).get(broker)
        if away is None:
            self.parts.setdefault(broker, []).append((at, call))
        elif at not in self._everywhere:
            self._error = self._error or away

    def came(self, answers: Iterable[Sequence[Any] | BrokerError]) -> None:
        """What each part's broker gave, or why it did not."""
        for (broker, part), told in zip(self.parts.items(), answers, strict=True):
            if isinstance(told, BrokerError):
                self._failed(broker, part, told)
                continue
            for (at, _call), answer in zip(part, told, strict=True):
                self._answers.setdefault(at, []).append(answer)

    def _failed(self, broker: str, part: BrokerCalls, error: BrokerError) -> None:
        self._maybe_done = self._maybe_done or error.maybe_done
        if self._left_out is not None and isinstance(error, UNREACHABLE):
            self._left_out[broker] = error
            if all(at in self._everywhere for at, _ in part):
                return
        self._error = self._error or error

    def ended(self) -> list[Any]:
        """All answers, in the order of their calls. What a broker refused is raised when all have been asked."""
        if self._error is not None:
            if self._answers or self._maybe_done:
                self._error.mark_maybe_done()
            raise self._error
        if self._left_out and len(self._answers) < len(self._calls):
            raise next(iter(self._left_out.values()))  # there is nobody left to ask
        return [_merge(call, self._answers[at]) for at, call in enumerate(self._calls)]


class BrokerRouter:
    """Several brokers, in plain Python. `get_driver` returns the driver of one of them."""

    def __init__(self, broker_map: BrokerMap, get_driver: Callable[[str], BlockingDriver]) -> None:
        self._map = broker_map
        self._reach = get_driver

    def perform(self, call: Call[T]) -> T:
        """Make one trip, or one to each broker. Raises BrokerError."""
        broker = self._map.find_broker_of_call(call)
        if broker is None or get_unreachable() is not None:
            return self.perform_all([call])[0]
        return self._reach(broker).perform(call)

    def perform_all(self, calls: Sequence[Call[T]]) -> list[T]:
        """Make many trips, those to one broker as one, to all of them at the same time. All are asked, though one of
        them is away, and the first error is raised then; within `skip_unreachable` that one is left out."""
        trips = _Trips(self._map, calls)
        if trips.parts:
            trips.came(run_all([partial(self._asked, *each) for each in trips.parts.items()]))
        return trips.ended()

    def _asked(self, broker: str, part: BrokerCalls) -> list[Any]:
        return self._reach(broker).perform_all([call for _, call in part])


class AsyncBrokerRouter:
    """Several brokers, in an event loop."""

    def __init__(self, broker_map: BrokerMap, get_driver: Callable[[str], Any]) -> None:
        self._map = broker_map
        self._reach = get_driver

    async def perform(self, call: Call[T]) -> T:
        """Perform a call like `BrokerRouter.perform`."""
        broker = self._map.find_broker_of_call(call)
        if broker is None or get_unreachable() is not None:
            return (await self.perform_all([call]))[0]
        redis: AsyncDriver = await self._reach(broker)
        return await redis.perform(call)

    async def perform_all(self, calls: Sequence[Call[T]]) -> list[T]:
        """Perform calls like `BrokerRouter.perform_all`."""
        trips = _Trips(self._map, calls)
        if trips.parts:
            trips.came(await run_all_async([partial(self._asked, *each) for each in trips.parts.items()]))
        return trips.ended()

    async def _asked(self, broker: str, part: BrokerCalls) -> list[Any]:
        redis: AsyncDriver = await self._reach(broker)
        return await redis.perform_all([call for _, call in part])


def _merge(call: Call[T], replies: Sequence[T]) -> T:
    """Return what several brokers replied to one call as one value."""
    if len(replies) == 1:
        return replies[0]
    if call.merge is None:
        raise TypeError(
            f"{call.words[0]!r} went to {len(replies)} brokers, but the call does not say how to merge"
        )
    return call.merge(replies)
