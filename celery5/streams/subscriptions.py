"""What subscribes to a stream of records: tasks, Data Sinks and health checks. Each is a processor of its own.

The name of the subscriber names the group, so that each subscriber gets all records.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, cast

import msgspec

from celery5.errors import Misconfigured
from celery5.health.health_check import HealthCheck
from celery5.protocol.annotations import refuse_injected
from celery5.protocol.events.documents import ResultDocument
from celery5.protocol.events.sinks import SinkOptions, get_sink_options
from celery5.protocol.health.readings import get_worst_state, parse_states
from celery5.protocol.task_kinds import FunctionKind
from celery5.runners.surrounding import surround_call
from celery5.streams.blocking_events import BlockingEvents
from celery5.streams.entry import StreamEntry
from celery5.streams.events import StreamEvents
from celery5.streams.stream import Stream
from celery5.tasks.task import Task

SINK_WITHIN = 1.0
"""Seconds for which a batch of a sink is gathered."""


class ProcessorDeclarer(Protocol):
    """What takes subscriptions: `app.streams`."""

    def declare_processor(
        self, stream: Stream[Any], options: dict[str, Any]
    ) -> Callable[[Callable[[Any], Any]], Any]:
        """Return the decorator of a processor. Raises Misconfigured."""
        ...


def subscribe(registry: ProcessorDeclarer, stream: Stream[Any], subscriber: Any, **options: Any) -> None:
    """Have a task or a sink get each record of a stream. `Stream.subscribe` explains it. Raises Misconfigured."""
    function: Callable[[Any], Any]
    defaults: dict[str, Any]
    if isinstance(subscriber, Task):
        task = cast("Task[Any, Any]", subscriber)
        function, defaults = _make_job_sender(task, stream), {"name": task.name, "loop": "trio"}
    elif hasattr(subscriber, "write"):
        sink = get_sink_options(subscriber)
        stream_app: Any = stream.app
        kind: FunctionKind = sink.kind or stream_app.loop
        function = _make_writer(sink, kind, stream)
        # One attempt more: a batch that fails is written one by one then.
        policy = msgspec.structs.replace(sink.retry, max_retries=sink.retry.max_retries + 1)
        loop = "asyncio" if kind == "asyncio" else "trio"
        defaults = {"name": sink.name, "on_error": policy, "loop": loop}
    else:
        raise Misconfigured(
            f"stream {stream.name}: {subscriber!r} cannot subscribe: give a task or a sink; for a health check "
            "there is subscribe_check"
        )
    registry.declare_processor(stream, {"then": "ignore", **defaults, **options})(function)


def subscribe_check(
    registry: ProcessorDeclarer,
    stream: Stream[Any],
    check: HealthCheck,
    judge: Callable[[Any], Any],
    **options: Any,
) -> None:
    """Have a health check report what a function says of each record. Raises Misconfigured."""
    if not isinstance(cast("object", check), HealthCheck):
        raise Misconfigured(f"stream {stream.name}: {check!r} is no health check")
    stream_app: Any = stream.app
    stream_app.health_check.add(check)  # what no worker runs reports to nobody
    refuse_injected(judge, f"health check {check.name} of stream {stream.name}")
    _check_takes_one(judge, f"health check {check.name} of stream {stream.name}")
    function = (
        _make_async_judge(check, judge)
        if inspect.iscoroutinefunction(judge)
        else _make_blocking_judge(check, judge)
    )
    defaults = {"name": f"check-{check.name}", "start": "latest", "then": "ignore"}
    registry.declare_processor(stream, {**defaults, **options})(function)


def _make_job_sender(task: Task[Any, Any], stream: Stream[Any]) -> Callable[[StreamEvents[Any]], Any]:
    _check_takes_one(task.function, f"task {task.name}, which subscribes to stream {stream.name}")

    async def send_jobs(events: StreamEvents[Any]) -> None:
        async for record in events.records():
            events.job(task.s(record))

    return send_jobs


def _make_writer(
    sink: SinkOptions, kind: FunctionKind, stream: Stream[Any]
) -> Callable[[StreamEvents[Any]], Any]:
    # How many records of a partition are written one by one, since a batch of them has failed.
    alone: dict[int, int] = {}

    async def write(events: StreamEvents[Any]) -> None:
        partition = events.partition
        while True:
            count = 1 if alone.get(partition) else sink.batch
            async for batch in events.take(count, within=SINK_WITHIN):
                try:
                    await _write(sink, kind, _make_documents(stream, batch))
                except Exception:
                    alone[partition] = max(alone.get(partition, 0), len(batch) if len(batch) > 1 else 0)
                    raise
                if alone.get(partition):
                    alone[partition] -= 1
                    break
            else:
                return

    return write


async def _write(sink: SinkOptions, kind: FunctionKind, documents: Sequence[ResultDocument]) -> None:
    """Write documents within the limit of the sink. Raises what it raises, trio.TooSlowError and TimeoutError."""
    if kind == "asyncio":
        import asyncio

        async with asyncio.timeout(sink.timeout):
            await sink.sink.write(documents)
        return
    import trio  # an application is declared without an event loop

    from celery5.runners.user_errors import call_in_thread

    with trio.fail_after(sink.timeout):
        if kind == "trio":
            await sink.sink.write(documents)
        else:
            write = surround_call(sink.sink.write, "thread")
            await call_in_thread(partial(write, documents))


def _make_documents(stream: Stream[Any], batch: Sequence[StreamEntry[Any]]) -> list[ResultDocument]:
    """Return records as sinks get them. A record that comes again after a crash has the same id."""
    return [
        ResultDocument(
            id=f"{stream.name}:{entry.partition}:{entry.id}",
            job="",
            task="",
            queue=stream.name,
            state="SUCCESS",
            value=stream.codec.to_document(entry.fields),
            sent=entry.time,
            finished=entry.time,
        )
        for entry in batch
    ]


def _make_async_judge(check: HealthCheck, judge: Callable[[Any], Any]) -> Callable[[StreamEvents[Any]], Any]:
    async def report(events: StreamEvents[Any]) -> None:
        async for record in events.records():
            _report(check, await judge(record))

    return report


def _make_blocking_judge(
    check: HealthCheck, judge: Callable[[Any], Any]
) -> Callable[[BlockingEvents[Any]], Any]:
    def report(events: BlockingEvents[Any]) -> None:
        for record in events.records():
            _report(check, judge(record))

    return report


def _report(check: HealthCheck, answer: object) -> None:
    states = parse_states(answer, check.states)
    check.report(get_worst_state(states, check.states) or check.good_state, "says a record")


def _check_takes_one(function: Callable[..., Any], what: str) -> None:
    """Raise Misconfigured unless a function can be called with a record."""
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise Misconfigured(f"{what}: it is called with one argument, the record: {error}") from None
    except ValueError:  # written in C: it has no signature
        pass
