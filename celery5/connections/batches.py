"""Iterate over what is read from a broker in batches, in any colour."""

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, Generic, TypeVar

from celery5.broker.colour import check_may_block, run_blocking

T = TypeVar("T")

ReadBatch = Callable[[], Coroutine[Any, Any, Sequence[T]]]
"""Return the next items; none when there are no more."""


class Batches(Generic[T]):
    """Items that are read batch by batch: `async for` in Trio and asyncio, `iterate` in plain Python.

    Not a generator: an asynchronous generator would have to be closed.

    Args:
        open_reader: Called when the first item is needed; returns what reads the batches.
    """

    def __init__(self, open_reader: Callable[[], Coroutine[Any, Any, ReadBatch[T]]]) -> None:
        self._open_reader = open_reader
        self._read_batch: ReadBatch[T] | None = None
        self._items: Iterator[T] = iter(())

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        if self._read_batch is None:
            self._read_batch = await self._open_reader()
        for item in self._items:
            return item
        self._items = iter(await self._read_batch())
        for item in self._items:
            return item
        raise StopAsyncIteration

    def iterate(self, instead: str) -> Iterator[T]:
        """Return an iterator for plain Python. Raises BlockingInEventLoop, which names the coroutine `instead`."""
        check_may_block(instead)
        return _iterate(run_blocking(self._open_reader()))


def _iterate(read_batch: ReadBatch[T]) -> Iterator[T]:
    while batch := run_blocking(read_batch()):
        yield from batch
