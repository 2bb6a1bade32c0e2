"""Processors: functions that read a stream, partition by partition. Workers run them."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypedDict, TypeVar, cast

from celery5.errors import Misconfigured
from celery5.hints import describe_option, find_hint
from celery5.protocol.job.retry_policy import RetryPolicy
from celery5.protocol.streams.failure import FAILURE_ACTIONS, FailureAction
from celery5.protocol.task_kinds import EventLoop, FunctionKind, choose_kind
from celery5.similar_names import did_you_mean
from celery5.streams.blocking_events import BlockingEvents
from celery5.streams.events import StreamEvents
from celery5.streams.middleware import ProcessorMiddleware, check_middleware
from celery5.streams.stream import Stream

R = TypeVar("R")

ProcessorFunction = Callable[[StreamEvents[R]], Awaitable[None]] | Callable[[BlockingEvents[R]], None]
NO_RETRIES = RetryPolicy(max_retries=0)


class ProcessorOptions(TypedDict, total=False):
    """The options of `@app.processor`: `Processor` explains them."""

    name: str
    start: str | datetime
    on_error: RetryPolicy
    then: FailureAction
    into: Stream[Any] | None
    prefetch: int
    concurrency: int
    commit_every: int
    commit_within: float
    grace_period: float | None
    absence: float
    middleware: Sequence[ProcessorMiddleware[Any]]
    loop: EventLoop | None


@dataclass(frozen=True, kw_only=True)
class Processor(Generic[R]):
    """A processor, and the group of its members. `@app.processor(stream)` declares one.

    Raises:
        Misconfigured: An option makes no sense.
    """

    function: ProcessorFunction[R]
    stream: Stream[R]
    name: str
    """The name of the group; by default that of the function."""
    start: str | datetime = "earliest"
    """Where a new group starts: `earliest`, `latest`, an id, or an aware datetime."""
    on_error: RetryPolicy = NO_RETRIES
    """How often a record that fails is tried again, in its place: what is behind it waits. None by default."""
    then: FailureAction = "quarantine"
    """What happens after that: `ignore` makes it a dead record and goes on; `park-key` sets it aside with all later
    records of its key, until `celery5 stream release`, and goes on with other keys; `quarantine` stops its partition
    for the group, on all workers, until `celery5 stream quarantine --clear`."""
    into: Stream[Any] | None = None
    """The stream that `events.send(...)` appends to."""
    prefetch: int = 256
    """How many records of a partition are read ahead. A few more may be here, as they are read in portions."""
    concurrency: int = 1
    """How many records of a partition are processed at once: those of one key in their order, one at a time."""
    commit_every: int = 20
    """After how many records of a partition the next ones wait for the commit: at most this many are processed again
    when the worker dies."""
    commit_within: float = 0.05
    """The most seconds until what is done is committed."""
    grace_period: float | None = None
    """Seconds that a record has to end when its worker stops or gives the partition away. None: the setting."""
    absence: float = 5.0
    """Seconds for which the partitions of a worker that has a name, `worker start --name`, are kept for its return
    when it stops. So a restart moves no other partition. Those of a worker without a name go to others at once."""
    middleware: Sequence[ProcessorMiddleware[Any]] = ()
    """What is called around each record, the outermost first."""
    loop: EventLoop | None = None
    """The event loop of an `async def`; by default that of the application. A `def` runs in threads, one for each
    partition."""
    default_loop: EventLoop = "trio"
    """The event loop of the application."""

    def __post_init__(self) -> None:
        """Check the options."""
        where = f"processor {self.name}"
        if not self.name or any(c.isspace() or c in ",{}:" for c in self.name) or len(self.name) > 200:
            raise Misconfigured(
                f"{where}: a name is 1 to 200 characters without spaces, commas, colons or braces"
            )
        self._check_then(where)
        for name, low, high in (
            ("prefetch", 1, 100_000),
            ("concurrency", 1, 1_000),
            ("commit_every", 1, 10_000),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise Misconfigured(f"{where}: {name} is {value!r}: give {low} to {high:,}")
        for name, seconds, most in (
            ("grace_period", self.grace_period or 0, 86_400),
            ("commit_within", self.commit_within, 60),
            ("absence", self.absence, 3_600),
        ):
            if not 0 <= seconds <= most:
                raise Misconfigured(f"{where}: {name} is {seconds!r}: give 0 to {most:,} seconds")
        if not isinstance(cast("object", self.on_error), RetryPolicy):
            raise Misconfigured(f"{where}: on_error is {self.on_error!r}: give a RetryPolicy")
        parse_start(self.start, where)
        check_middleware(self.middleware, where, is_blocking=self.kind == "thread")

    def _check_then(self, where: str) -> None:
        if self.then not in FAILURE_ACTIONS:
            suggestion = did_you_mean(
                str(self.then), FAILURE_ACTIONS, otherwise=f"give {' or '.join(FAILURE_ACTIONS)}"
            )
            hint = find_hint("failure action", str(self.then).rpartition(".")[2]) or f"; {suggestion}"
            raise Misconfigured(f"{where}: then is {self.then!r}{hint}")
        if self.then == "park-key" and not self.stream.codec.has_keys:
            raise Misconfigured(
                f"{where}: then='park-key' needs records with keys: declare stream {self.stream.name} with by=..."
            )

    @property
    def kind(self) -> FunctionKind:
        """Where it runs. Raises Misconfigured."""
        return choose_kind(self.function, self.loop, self.default_loop, f"processor {self.name}")

    def get_grace_period(self, default: float) -> float:
        """Return the seconds that a record has to end: `default` when the processor declares none."""
        return default if self.grace_period is None else self.grace_period

    @property
    def first_id(self) -> str:
        """Where a new group starts, as the scripts take it: the first id that it reads, or $."""
        return parse_start(self.start, f"processor {self.name}")


def parse_start(start: str | datetime, where: str) -> str:
    """Return the first id that is read from `earliest`, `latest`, an id or a time; $ for the end.

    Raises:
        Misconfigured: It is none of these.
    """
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise Misconfigured(f"{where}: start is {start!r}: give a datetime with a time zone")
        return f"{max(0, int(start.timestamp() * 1000))}-0"
    if start == "earliest":
        return "0-0"
    if start == "latest":
        return "$"
    ms, _, number = str(start).partition("-")
    if ms.isdigit() and (number.isdigit() or not number) and len(str(start)) <= 40:
        return f"{ms}-{number or 0}"
    try:
        return parse_start(datetime.fromisoformat(str(start)), where)
    except ValueError:
        pass
    raise Misconfigured(
        f"{where}: start is {start!r}: give earliest, latest, an id such as 1700000000000-5, or a time such as "
        "2026-01-31T12:00:00+00:00"
    )


def make_processor(
    stream: object, function: object, options: dict[str, Any], default_loop: EventLoop
) -> Processor[Any]:
    """Return the processor of a function, in an application with that event loop. Raises Misconfigured."""
    if not isinstance(stream, Stream):
        raise Misconfigured(f"@app.processor({stream!r}): give a stream, app.stream(...)")
    if not inspect.isroutine(function):
        raise Misconfigured(f"@app.processor(...): {function!r} is no function")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise Misconfigured(
            f"processor {function.__name__} has a yield: it is to take records from its events"
        )
    if len(inspect.signature(function).parameters) != 1:
        raise Misconfigured(f"processor {function.__name__}: a processor takes one argument, its events")
    unknown = sorted(set(options) - set(ProcessorOptions.__annotations__))
    if unknown:
        known = list(ProcessorOptions.__annotations__)
        raise Misconfigured(
            f"processor {function.__name__}: {describe_option('processor option', unknown[0], known)}"
        )
    named: Any = {"name": function.__name__, **options, "default_loop": default_loop}
    return Processor(function=function, stream=cast("Stream[Any]", stream), **named)
