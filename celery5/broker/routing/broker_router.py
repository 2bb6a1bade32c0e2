"""One driver for several brokers: each call goes to the broker of its key.

The keys of a queue contain its name, so a call alone shows which broker it goes to. The keys of an application are
on
the default broker, except those that each broker has for its own queues: calls with these go to all brokers.
"""

import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from celery5.broker.call import Call
from celery5.broker.colour import BlockingDriverAdapter, current_colour, run_blocking
from celery5.broker.driver import AsyncDriver, BlockingDriver
from celery5.broker.routing.unreachable import UNREACHABLE, get_unreachable
from celery5.errors import BrokerError
from celery5.protocol.counts import format_count

T = TypeVar("T")


def run_all(functions: Sequence[Callable[[], T]]) -> list[T | BrokerError]:
    """Call functions at the same time, all but the last in threads.

    Returns:
        What each function returned, or the BrokerError that it raised. Any other error is raised when all have ended.
    """
    outcomes: dict[int, T | Exception] = {}

    def run(index: int) -> None:
        try:
            outcomes[index] = functions[index]()
        except Exception as error:
            outcomes[index] = error

    threads = [
        threading.Thread(target=run, args=(index,), daemon=True, name="celery5 broker")
        for index in range(len(functions) - 1)
    ]
    for thread in threads:
        thread.start()
    run(len(functions) - 1)
    for thread in threads:
        thread.join()
    return [_check_outcome(outcomes[index]) for index in range(len(functions))]


async def run_all_async(functions: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T | BrokerError]:
    """Do as `run_all` with coroutine functions: as tasks on Trio and asyncio, in threads in plain Python."""
    outcomes: dict[int, T | Exception] = {}

    async def run(index: int) -> None:
        try:
            outcomes[index] = await functions[index]()
        except Exception as error:
            outcomes[index] = error

    if len(functions) == 1:
        await run(0)
    elif (colour := current_colour()) is None:
        return run_all([partial(_run_blocking, function) for function in functions])
    elif colour == "trio":
        import trio

        async with trio.open_nursery() as nursery:
            for index in range(len(functions)):
                nursery.start_soon(run, index)
    else:
        import asyncio

        await asyncio.gather(*[run(index) for index in range(len(functions))])
    return [_check_outcome(outcomes[index]) for index in range(len(functions))]


def _run_blocking(function: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return run_blocking(function())


def _check_outcome(outcome: Any) -> Any:
    if isinstance(outcome, Exception) and not isinstance(outcome, BrokerError):
        raise outcome
    return outcome


ALL_BROKER_KEYS = ("queues", "paused", "limits", "suspended", "schedule-queues", "living:")
"""Prefixes of an application's keys that each broker has: their values are merged."""
DEFAULT_BROKER_KEYS = ("living:controller", "living:publisher")
"""Those of them that only the default broker has, so that only it must be reachable to command these processes."""
QUEUE_COMMANDS = ("SADD", "SREM")
"""Commands that change such a key for one queue, which they name: they go to that queue's broker."""


class BrokerMap(NamedTuple):
    """Which broker a key is on. Keys of a foreign application are expected on the default broker."""

    # Names of the brokers, the default one first.
    brokers: Sequence[str]
    # Returns the broker of a queue of the application.
    broker_of_queue: Callable[[str], str]
    # Name of the application.
    app: str

    def find_broker_of_key(self, key: str) -> str | None:
        """Return the broker of a key; None for all of them."""
        tag, _, rest = key.partition("}:")
        app, _, queue = tag.partition("{")[2].partition(":")
        if queue:
            return self.broker_of_queue(queue) if app == self.app else self.brokers[0]
        if rest.startswith(ALL_BROKER_KEYS) and rest not in DEFAULT_BROKER_KEYS:
            return None
        suffix = rest.rpartition("@")[
            2
        ]  # an inbox of a process that is on another broker, and what is about it
        return suffix if suffix in self.brokers else self.brokers[0]

    def find_broker_of_call(self, call: Call[Any]) -> str | None:
        """Return the broker that a call goes to; None for all of them."""
        words = call.words
        if words[0] in QUEUE_COMMANDS and self.find_broker_of_key(str(words[1])) is None:
            return self.broker_of_queue(str(words[2]))
        key = words[3:4] if call.script is not None else words[1:2]
        return self.find_broker_of_key(str(key[0])) if key else self.any_reachable

    @property
    def any_reachable(self) -> str:
        """The broker for calls that any of them can answer, the time for instance."""
        unreachable = get_unreachable() or {}
        return next((broker for broker in self.brokers if broker not in unreachable), self.brokers[0])


BrokerCalls = list[tuple[int, Call[Any]]]
"""The calls that go to one broker, each with its index among all calls."""


class _RoutedCalls:
    """Several calls, split by broker, and the replies to them."""

    def __init__(self, broker_map: BrokerMap, calls: Sequence[Call[Any]]) -> None:
        self._calls = calls
        self._replies: dict[int, list[Any]] = {}
        # Indexes of the calls that go to all brokers.
        self._everywhere: set[int] = set()
        self._unreachable = get_unreachable()
        self._error: BrokerError | None = None
        # Whether a broker failed that may have done its part.
        self._maybe_done = False
        self.parts: dict[str, BrokerCalls] = {}
        for index, call in enumerate(calls):
            broker = broker_map.find_broker_of_call(call)
            if broker is None:
                self._everywhere.add(index)
            for name in broker_map.brokers if broker is None else (broker,):
                self._add_call(name, index, call)

    def _add_call(self, broker: str, index: int, call: Call[Any]) -> None:
        """Plan a call for a broker, unless that broker is already left out as unreachable."""
        error = (self._unreachable or {}).get(broker)
        if error is None:
            self.parts.setdefault(broker, []).append((index, call))
        elif index not in self._everywhere:
            self._error = self._error or error

    def add_replies(self, outcomes: Iterable[Sequence[Any] | BrokerError]) -> None:
        """Take the replies of each part's broker, or its error."""
        for (broker, part), outcome in zip(self.parts.items(), outcomes, strict=True):
            if isinstance(outcome, BrokerError):
                self._add_error(broker, part, outcome)
                continue
            for (index, _call), reply in zip(part, outcome, strict=True):
                self._replies.setdefault(index, []).append(reply)

    def _add_error(self, broker: str, part: BrokerCalls, error: BrokerError) -> None:
        self._maybe_done = self._maybe_done or error.maybe_done
        if self._unreachable is not None and isinstance(error, UNREACHABLE):
            self._unreachable[broker] = error
            if all(index in self._everywhere for index, _ in part):
                return
        self._error = self._error or error

    def merge_replies(self) -> list[Any]:
        """Return the replies, in the order of the calls. Raises the first error of a broker."""
        if self._error is not None:
            if self._replies or self._maybe_done:
                self._error.mark_maybe_done()
            raise self._error
        if self._unreachable and len(self._replies) < len(self._calls):
            raise next(iter(self._unreachable.values()))  # no broker is left
        return [_merge(call, self._replies[index]) for index, call in enumerate(self._calls)]


class AsyncBrokerRouter:
    """Performs calls on several brokers, in any colour that `get_driver` fits.

    Args:
        broker_map: Where keys belong.
        get_driver: Returns the driver of one broker, by its name.
    """

    def __init__(self, broker_map: BrokerMap, get_driver: Callable[[str], Awaitable[AsyncDriver]]) -> None:
        self._map = broker_map
        self._get_driver = get_driver

    async def perform(self, call: Call[T]) -> T:
        """Perform a call on its broker, or on each broker. Raises BrokerError."""
        broker = self._map.find_broker_of_call(call)
        if broker is None or get_unreachable() is not None:
            return (await self.perform_all([call]))[0]
        return await (await self._get_driver(broker)).perform(call)

    async def perform_all(self, calls: Sequence[Call[T]]) -> list[T]:
        """Perform several calls: those for one broker in one write, on all brokers at the same time.

        An unreachable broker does not stop the calls to the others; the first error is raised when all have ended.
        Within `skip_unreachable` an unreachable one is left out.
        """
        routed = _RoutedCalls(self._map, calls)
        if routed.parts:
            routed.add_replies(
                await run_all_async([partial(self._perform_part, *part) for part in routed.parts.items()])
            )
        return routed.merge_replies()

    async def _perform_part(self, broker: str, part: BrokerCalls) -> list[Any]:
        return await (await self._get_driver(broker)).perform_all([call for _, call in part])


class BrokerRouter:
    """`AsyncBrokerRouter` in plain Python. `get_driver` returns the driver of one broker, by its name."""

    def __init__(self, broker_map: BrokerMap, get_driver: Callable[[str], BlockingDriver]) -> None:
        async def get_adapter(broker: str) -> AsyncDriver:
            return BlockingDriverAdapter(get_driver(broker))

        self._map, self._get_driver = broker_map, get_driver
        self._router = AsyncBrokerRouter(broker_map, get_adapter)

    def perform(self, call: Call[T]) -> T:
        """Perform a call like `AsyncBrokerRouter.perform`."""
        return run_blocking(self._router.perform(call))

    def perform_all(self, calls: Sequence[Call[T]]) -> list[T]:
        """Perform calls like `AsyncBrokerRouter.perform_all`."""
        return run_blocking(self._router.perform_all(calls))

    def perform_replicated(
        self, calls: Sequence[Call[T]], waits: Sequence[Call[int]]
    ) -> tuple[list[T], int | BrokerError]:
        """Perform calls for one broker, on that, and wait for its replicas."""
        broker = self._map.find_broker_of_call(waits[0]) or self._map.brokers[0]
        return self._get_driver(broker).perform_replicated(calls, waits)


def _merge(call: Call[T], replies: Sequence[T]) -> T:
    """Return what several brokers replied to one call as one value."""
    if len(replies) == 1:
        return replies[0]
    if call.merge is None:
        raise TypeError(
            f"{call.words[0]!r} went to {format_count(len(replies), 'broker')}, but the call does not say how to merge"
        )
    return call.merge(replies)
