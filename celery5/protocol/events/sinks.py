"""Data Sinks: where documents of results go besides Redis, and the options of sinks."""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, cast

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.annotations import refuse_injected
from celery5.protocol.events.documents import ResultDocument, ResultState, parse_result_states
from celery5.protocol.job.retry_policy import RetryPolicy
from celery5.protocol.task_kinds import FunctionKind, choose_kind

BATCH = 100
"""The default for the number of documents in one `write`."""
TIMEOUT = 30.0
"""The default for the seconds of one `write`."""
RETRY = RetryPolicy(max_retries=10, backoff=1.0, cap=300.0)
"""The default for the retries of a document that fails alone."""


class Sink(Protocol):
    """A Data Sink: it has a `name` and takes documents, with `def` in its own thread or `async def` in an event loop.

    A sink gets each document at least once: after a failure, or when a Router died, a document may come again with
    the same `id`. Attributes are options:

    - `on`: the final states that it takes; default `("SUCCESS",)`; also DEAD, EXPIRED, REVOKED and REJECTED.
    - `batch`: the maximal number of documents at once; default 100.
    - `timeout`: the seconds that `write` may take; default 30.
    - `loop`: the event loop of `async def write`, `trio` or `asyncio`; default that of the application.
    - `retry`: a RetryPolicy for each document that fails alone; default 10 retries, after 1 s at first and at most
    5 min.
      After that the document is in the dead-letter queue.

    A method `close` is called when a Router stops. A method `check` is called before one starts: it raises
    Misconfigured when the sink can never work on this host.
    """

    @property
    def name(self) -> str:
        """The name by which all Routers know the sink, also after restarts."""
        ...

    def write(self, documents: Sequence[ResultDocument], /) -> Any:
        """Store documents. Return when all of them are stored; raise when they may not be."""
        ...


class RedisResults:
    """Results in Redis, where `get` finds them, as without any sink.

    Args:
        ttl: How long they are kept, in seconds or as a timedelta, like the option `results_ttl`.
    """

    name = "redis"

    def __init__(self, *, ttl: float | timedelta | None = None) -> None:
        self.ttl = ttl


class SinkOptions(msgspec.Struct, frozen=True, eq=False):
    """A sink and its options."""

    sink: Sink
    name: str
    states: tuple[ResultState, ...]
    batch: int
    timeout: float
    retry: RetryPolicy
    # Where `write` runs; None: in the event loop of the application.
    kind: FunctionKind | None


def get_sink_options(sink: Any) -> SinkOptions:
    """Return the options of a sink. Raises Misconfigured for an object that is no sink, or invalid options."""
    name, write = getattr(sink, "name", None), getattr(sink, "write", None)
    if not callable(write) or isinstance(sink, type):
        raise Misconfigured(
            f"{sink!r} is no sink: give an object with a name and a method write(documents), such as FileSink(...)"
        )
    if name is None:
        raise Misconfigured(f"{sink!r} has no name: give a sink one that stays, such as name = 'orders'")
    if not isinstance(name, str) or not 0 < len(name) <= 100 or any(c.isspace() or c in "{}:," for c in name):
        raise Misconfigured(
            f"sink name {name!r}: use 1 to 100 characters without spaces, commas, braces or colons"
        )
    what = f"sink {name!r}"
    if not _takes_one(write):
        raise Misconfigured(
            f"{what}: write must take the documents, and nothing else: write(self, documents)"
        )
    batch, timeout = getattr(sink, "batch", BATCH), getattr(sink, "timeout", TIMEOUT)
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= 1000:
        raise Misconfigured(f"{what}: batch is {batch!r}; give a number of documents, 1 to 1000")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise Misconfigured(f"{what}: timeout is {timeout!r}; give seconds, more than 0")
    try:
        retry = RetryPolicy.parse(getattr(sink, "retry", None) or RETRY)
    except Misconfigured as error:
        raise Misconfigured(f"{what}: {error}") from None
    on = parse_result_states(getattr(sink, "on", ("SUCCESS",)), what)
    loop = getattr(sink, "loop", None)
    is_undecided = loop is None and inspect.iscoroutinefunction(write)
    refuse_injected(write, what)
    kind = None if is_undecided else choose_kind(write, loop, "trio", what)
    return SinkOptions(sink, name, on, batch, timeout, retry, kind)


def _takes_one(write: Callable[..., Any]) -> bool:
    """Return whether a function takes one argument; True for functions without a signature, as those in C."""
    try:
        inspect.signature(write).bind(())
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def check_sinks(outlets: Collection[SinkOptions]) -> None:
    """Call `check` of each sink. Raises Misconfigured when one can never work on this host."""
    for options in outlets:
        check = getattr(options.sink, "check", None)
        if callable(check):
            check()


def parse_sinks(sinks: Any, task: str) -> tuple[tuple[SinkOptions, ...], RedisResults | None]:
    """Return the sinks of a task, and the options of its results in Redis. Raises Misconfigured."""
    if isinstance(sinks, str) or not isinstance(sinks, Sequence):
        raise Misconfigured(f"task {task}: sinks is {sinks!r}; give a list of sinks")
    listed = cast("Sequence[Any]", sinks)
    outlets = tuple(get_sink_options(sink) for sink in listed if not isinstance(sink, RedisResults))
    names = [sink.name for sink in outlets]
    duplicates = [name for name in names if names.count(name) > 1]
    if duplicates:
        raise Misconfigured(f"task {task} has two sinks named {duplicates[0]!r}: give one another name")
    return outlets, next((sink for sink in listed if isinstance(sink, RedisResults)), None)


class SinkedTask(Protocol):
    """The properties of a task that concern sinks."""

    sinks: tuple[SinkOptions, ...]
    recipients: Mapping[str, str] | None

    @property
    def name(self) -> str:
        """Its name."""
        ...


def get_all_sink_options(tasks: Collection[SinkedTask]) -> tuple[SinkOptions, ...]:
    """Return all sinks of an application. Raises Misconfigured when two different ones have the same name."""
    sinks: dict[str, SinkOptions] = {}
    for task in tasks:
        for options in task.sinks:
            first = sinks.setdefault(options.name, options)
            if first.sink is not options.sink:
                raise Misconfigured(
                    f"two sinks are named {options.name!r}: give one another name, or use one object"
                )
    return tuple(sinks.values())


def get_sink_names(tasks: Iterable[SinkedTask]) -> list[str]:
    """Return the names of all sinks of these tasks, sorted."""
    return sorted({options.name for task in tasks for options in task.sinks})


def get_all_recipients(tasks: Collection[SinkedTask]) -> Mapping[str, str]:
    """Return the sinks for documents, by final state and task, as `declare_recipients.lua` takes them.

    Empty when no task has a sink.
    """
    if not any(task.recipients for task in tasks):
        return {}
    ends: tuple[ResultState, ...] = (
        "DEAD",
        "REVOKED",
    )  # for the other states, the worker that ran the task has its sinks
    return {f"{end} {task.name}": (task.recipients or {}).get(end, "") for task in tasks for end in ends}
