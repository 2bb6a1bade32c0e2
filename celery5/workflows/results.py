"""Results of a map that are read a thousand at a time, so that nobody has all of them in memory."""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar, get_args

import msgspec

from celery5.broker.colour import check_may_block, run_blocking
from celery5.errors import Misconfigured
from celery5.workflows.values import MapLocation, MapPages

T = TypeVar("T")

REFERENCE = "$results"
"""The name in a message under which an argument says where its results are."""
PAGE_BUCKETS = 8
"""Hashes of 128 results in one page."""


class Results(Generic[T]):
    """The results of a map, in order, which are read from Redis about a thousand at a time.

    Annotate the parameter of the step that follows a map with it. In an async task iterate with `async for`, in a `def`
    with `for`; each iteration reads them again. Results of members that were left out are not among them.

    Args:
        values: Results that are there already, for tests and direct calls.
    """

    def __init__(self, values: Iterable[T] = ()) -> None:
        self._values = list(values)
        self._location: MapLocation | None = None
        self._decode: Callable[[bytes], Any] = msgspec.json.decode
        self._app: Any = None

    def __repr__(self) -> str:
        return (
            f"Results({self._values!r})" if self._location is None else f"<Results of {self._location.run}>"
        )

    def __iter__(self) -> Iterator[T]:
        """Iterate in plain Python, and in a `def` task. Raises ResultLost, BrokerUnavailable, BlockingInEventLoop."""
        if self._location is None:
            yield from self._values
            return
        check_may_block()
        pages = run_blocking(self._open(self._get_app().connections))
        while (page := run_blocking(pages.read_next())) is not None:
            yield from map(self._decode, page)

    async def __aiter__(self) -> AsyncIterator[T]:
        """Iterate on Trio or asyncio. Raises ResultLost, BrokerUnavailable."""
        if self._location is None:
            for value in self._values:
                yield value
            return
        pages = await self._open(self._get_app().connections)
        while (page := await pages.read_next()) is not None:
            for raw in page:
                yield self._decode(raw)

    async def _open(self, connections: Any) -> MapPages:
        assert self._location is not None
        queue, run_id, node = self._location
        redis = await connections.get_async_driver()
        return MapPages(redis, self._app.queue(queue), run_id, node, buckets=PAGE_BUCKETS)

    def _get_app(self) -> Any:
        if self._app is None:
            raise Misconfigured(f"{self!r} can be read where it was passed to: in a task that a worker runs")
        return self._app

    @classmethod
    def convert_from_json(
        cls, kind: Any, value: Any, hook: Callable[[type[Any], Any], Any]
    ) -> "Results[Any]":
        """Return the argument that JSON stands for: a list, or where results are. `Parameters` calls this."""
        item = (*get_args(kind), Any)[0]
        results = cls()
        if isinstance(value, list):
            results._values = msgspec.convert(value, list[item], dec_hook=hook)  # type: ignore[valid-type]
        else:
            results._location = msgspec.convert(value[REFERENCE], MapLocation)
            results._decode = msgspec.json.Decoder(item, dec_hook=hook).decode
        return results

    def convert_to_json(self) -> Any:
        """Return what stands for it in JSON."""
        return self._values if self._location is None else {REFERENCE: self._location}


def make_stored_results(app: Any, location: MapLocation, decode: Callable[[bytes], Any]) -> Results[Any]:
    """Return the results of a map that a handle has found."""
    results = Results[Any]()
    results._app, results._location, results._decode = app, location, decode  # pyright: ignore[reportPrivateUsage]
    return results


def set_app(values: Iterable[Any], app: Any) -> None:
    """Let all results among the arguments of a job be read from the application's broker."""
    for value in values:
        if isinstance(value, Results):
            value._app = app  # pyright: ignore[reportPrivateUsage]
