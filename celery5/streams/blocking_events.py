"""Events for processors that are plain functions: `StreamEvents` without `await`.

Such a function runs in a thread. Its feed blocks the thread where others wait, so that what is `async` never suspends
there, and can be run to its end by one `send`.
"""

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Generic, TypeVar, Unpack, cast, overload

from celery5.protocol.streams.windows import WindowKey, WindowShape
from celery5.streams.codec import RecordCodec
from celery5.streams.entry import StreamEntry
from celery5.streams.events import EntryBatches, KeyedState, Outputs, RecordBatches, Records, StreamEvents
from celery5.streams.feed import RecordFeed
from celery5.streams.stream import Stream
from celery5.streams.windows import Window, WindowSettings

R = TypeVar("R")
T = TypeVar("T")
A = TypeVar("A")
K = TypeVar("K", bound=WindowKey)


class BlockingEvents(Outputs, Generic[R]):
    """The records of one partition, for a processor that is a plain function.

    Iterate over it for entries, over `records()` for records, over `take(...)` for batches.
    """

    def __init__(self, feed: RecordFeed, codec: RecordCodec[R], into: Stream[Any] | None = None) -> None:
        super().__init__(feed, into)
        self._events = StreamEvents(feed, codec, into)
        self.state: BlockingState = BlockingState(self._events.state)

    def __iter__(self) -> Iterator[StreamEntry[R]]:
        return BlockingIterator(self._events)

    def records(self) -> "BlockingRecords[R]":
        """Return the records themselves, to iterate over."""
        return BlockingRecords(self._events.records())

    def take(self, count: int, *, within: float) -> "BlockingEntryBatches[R]":
        """Return batches of entries, to iterate over: `StreamEvents.take` explains it."""
        return BlockingEntryBatches(self._events.take(count, within=within))

    @overload
    def windows(
        self,
        shape: WindowShape,
        *,
        initial: A,
        add: Callable[[A, R], A],
        by: None = None,
        **options: Unpack[WindowSettings[R]],
    ) -> "BlockingIterator[Window[str, A]]": ...
    @overload
    def windows(
        self,
        shape: WindowShape,
        *,
        initial: A,
        add: Callable[[A, R], A],
        by: Callable[[R], K],
        **options: Unpack[WindowSettings[R]],
    ) -> "BlockingIterator[Window[K, A]]": ...
    def windows(
        self,
        shape: WindowShape,
        *,
        initial: Any,
        add: Callable[[Any, R], Any],
        by: Any = None,
        **options: Unpack[WindowSettings[R]],
    ) -> "BlockingIterator[Window[Any, Any]]":
        """Gather records in windows of event time: `StreamEvents.windows` explains it."""
        return BlockingIterator(self._events.windows(shape, initial=initial, add=add, by=by, **options))


class BlockingState:
    """State of a processor by key: `KeyedState` without `await`."""

    def __init__(self, state: KeyedState) -> None:
        self._state = state
        self.set = state.set
        self.delete = state.delete

    def get(self, key: str, default: Any = None, *, type: Any = Any) -> Any:  # noqa: A002  as msgspec has it
        """Return the value of a key, as it is with all changes so far; `default` when there is none.

        Raises:
            msgspec.ValidationError: The value is not of the type.
        """
        return run_without_waiting(self._state.get(key, default, type=type))


class BlockingIterator(Generic[T]):
    """Iterates over what never suspends."""

    def __init__(self, iterator: AsyncIterator[T]) -> None:
        self._next: Callable[[], Coroutine[Any, Any, T]] = cast("Any", iterator.__anext__)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        try:
            return run_without_waiting(self._next())
        except StopAsyncIteration:
            raise StopIteration from None


class BlockingRecords(BlockingIterator[R]):
    """The records of a partition."""

    def __init__(self, records: Records[R]) -> None:
        super().__init__(records)
        self._records = records

    def take(self, count: int, *, within: float) -> "BlockingIterator[list[R]]":
        """Return batches of records: `StreamEvents.take` explains it."""
        return BlockingIterator[list[R]](self._records.take(count, within=within))


class BlockingEntryBatches(BlockingIterator[list[StreamEntry[R]]]):
    """Batches of entries."""

    def __init__(self, batches: EntryBatches[R]) -> None:
        super().__init__(batches)
        self._batches = batches

    def records(self) -> "BlockingIterator[list[R]]":
        """Return the same batches as lists of records."""
        batches: RecordBatches[R] = self._batches.records()
        return BlockingIterator(batches)


def run_without_waiting(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise RuntimeError("something waits for an event loop in a thread that has none")
