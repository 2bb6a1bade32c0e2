"""Middleware of processors: what is called around each record.

The order is that of Django's and Runnel's middleware: `before` in the order of the list, the others in reverse.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from celery5.broker.calls.streams import RawEntry
from celery5.errors import BadRecord, CeleryError, Misconfigured
from celery5.runners.operations import MessageOperation, OperationSurround
from celery5.streams.codec import RecordCodec, get_headers_field, read_record_headers
from celery5.streams.entry import StreamEntry

R = TypeVar("R")

HOOKS = ("before", "after", "on_error", "on_skip")


class RecordSkipped(CeleryError):
    """Raised by `before` of a middleware: the processor does not get this record, which counts as processed."""


class ProcessorMiddleware(Generic[R]):
    """What is called around each record of a processor: `@app.processor(stream, middleware=[...])`.

    Override what you need. Each method may be `async def`, on the event loop of the processor; for a processor that
    runs in a thread they are plain functions. What a method raises is a failure of the record, but for `RecordSkipped`.
    One object serves all partitions.
    """

    def before(self, entry: StreamEntry[R]) -> Any:
        """Called before the processor gets a record.

        Returns:
            None to pass the record on as it is; another record of the stream's class to pass on that.

        Raises:
            RecordSkipped: The processor does not get the record.
        """

    def after(self, entry: StreamEntry[R]) -> Any:
        """Called when the processor has asked for the next record, or returned; before the record is committed.

        After a crash it may be called again, as the processor is.
        """

    def on_error(self, entry: StreamEntry[R], error: Exception) -> Any:
        """Called when a record has failed, at each attempt: it may be tried again."""

    def on_skip(self, entry: StreamEntry[R], why: str) -> Any:
        """Called when a record was left out by `before`, or was given up and becomes a dead record."""


def check_middleware(
    middleware: object, where: str, *, is_blocking: bool
) -> tuple[ProcessorMiddleware[Any], ...]:
    """Return the middleware of a processor as a tuple.

    Args:
        middleware: What was declared.
        where: The processor, for errors.
        is_blocking: Whether it runs in a thread, where nothing can be awaited.

    Raises:
        Misconfigured: It is none.
    """
    if not isinstance(middleware, list | tuple):
        raise Misconfigured(f"{where}: middleware is {middleware!r}: give a list")
    checked: list[ProcessorMiddleware[Any]] = []
    for item in middleware:  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(item, ProcessorMiddleware):
            raise Misconfigured(
                f"{where}: {item!r} is no middleware: give an object of a subclass of ProcessorMiddleware"
            )
        waiting = [hook for hook in HOOKS if inspect.iscoroutinefunction(getattr(item, hook))]  # pyright: ignore[reportUnknownArgumentType]
        if is_blocking and waiting:
            raise Misconfigured(
                f"{where} runs in a thread, and {waiting[0]} of its middleware "
                f"{type(item).__name__} is `async def`: write `def`"  # pyright: ignore[reportUnknownArgumentType]
            )
        checked.append(item)  # pyright: ignore[reportUnknownArgumentType]
    return tuple(checked)


class MiddlewareCalls:
    """Calls the middleware of a processor around the records of one feed, and what surrounds their processing.

    Args:
        middleware: The middleware, the outermost first.
        codec: How records are encoded.
        group: The name of the processor.
        partition: The partition.
        operating: What surrounds the processing of each record, or of each batch, outside of the middleware.
        stream: The name of the stream.
    """

    def __init__(
        self,
        middleware: Sequence[ProcessorMiddleware[Any]],
        codec: RecordCodec[Any],
        *,
        group: str,
        partition: int,
        operating: OperationSurround | None = None,
        stream: str = "",
    ) -> None:
        self._middleware = tuple(middleware)
        self._reversed = self._middleware[::-1]
        self._codec = codec
        self._group = group
        self._partition = partition
        self._operating = operating
        self._stream = stream
        self._operation: tuple[MessageOperation, AbstractContextManager[None]] | None = None
        self._entries: list[StreamEntry[Any]] = []

    async def enter(self, raws: Sequence[RawEntry]) -> list[RawEntry]:
        """Call what comes before records that were taken. Return what the processor gets of them."""
        if raws:
            self._begin(raws)
        return [raw for raw in [await self._enter(raw) for raw in raws] if raw is not None]

    async def leave(self) -> None:
        """Call what follows the records that were taken."""
        while self._entries:
            await self._call_all(self._reversed, "after", self._entries[0])
            del self._entries[0]
        self.end(None)

    async def fail(self, error: Exception) -> None:
        """Say that the function has failed on what it has."""
        entries, self._entries = self._entries, []
        try:
            for entry in entries:
                await self._call_all(self._reversed, "on_error", entry, error)
        finally:
            self.end(error)

    async def skip(self, entries: Sequence[RawEntry], why: str) -> None:
        """Say that records are given up."""
        for raw in entries:
            await self._call_all(self._reversed, "on_skip", self._make_entry(raw), why)

    async def _enter(self, raw: RawEntry) -> RawEntry | None:
        """Return what the processor gets for a record; None for one that is skipped."""
        entry = self._make_entry(raw)
        self._entries.append(entry)
        try:
            for middleware in self._middleware:
                changed = await _call(middleware.before, entry)
                if changed is not None:
                    entry = self._make_entry(
                        (raw[0], [*self._encode(changed, middleware), *get_headers_field(raw[1])])
                    )
                    self._entries[-1] = entry
        except RecordSkipped as skipped:
            self._entries.pop()
            await self._call_all(self._reversed, "on_skip", entry, str(skipped) or "skipped")
            return None
        return raw[0], entry.fields

    def _encode(self, record: object, middleware: object) -> Sequence[bytes]:
        try:
            words = self._codec.encode(record)
        except BadRecord as error:
            raise BadRecord(f"before of {type(middleware).__name__} has returned: {error}") from error
        return [word if isinstance(word, bytes) else str(word).encode() for word in words]

    def _begin(self, raws: Sequence[RawEntry]) -> None:
        """Enter what surrounds the processing of these records."""
        if self._operating is not None:
            headers = [read_record_headers(fields) for _, fields in raws]
            operation = MessageOperation("process", "stream", self._stream, len(raws), headers)
            self._operation = operation, self._operating(operation)
            self._operation[1].__enter__()

    def end(self, error: BaseException | None) -> None:
        """Leave what surrounds the records that were taken, if that was not left yet."""
        if self._operation is not None:
            (operation, block), self._operation = self._operation, None
            operation.error = error
            block.__exit__(None, None, None)

    async def _call_all(self, middleware: Sequence[ProcessorMiddleware[Any]], hook: str, *words: Any) -> None:
        for item in middleware:
            await _call(getattr(item, hook), *words)

    def _make_entry(self, raw: RawEntry) -> StreamEntry[Any]:
        return StreamEntry(self._partition, self._group, raw, self._codec)


async def _call(hook: Callable[..., Any], *words: Any) -> Any:
    result = hook(*words)
    return await result if inspect.isawaitable(result) else result
