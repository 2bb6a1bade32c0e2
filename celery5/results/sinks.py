"""Sinks: where documents of results go besides Redis: what a Data Sink is, and what is said of it (C86)."""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

from celery5.errors import Misconfigured
from celery5.protocol.events.documents import ResultDocument, ResultState, parse_result_states
from celery5.protocol.job.retry_policy import RetryPolicy

BATCH = 100
"""Documents that a sink is given at once, unless it says otherwise."""
TIMEOUT = 30.0
"""Seconds that it may take for them."""
RETRY = RetryPolicy(max_retries=10, backoff=1.0, cap=300.0)
"""How often a document is tried again that fails alone."""


class Sink(Protocol):
    """A Data Sink: it has a `name` and takes documents, `def` in a thread of its own or `async def` on Trio.

    `write` returns when it has all of them, and raises when it may not have all. It is given each document at least
    once: one that it may have already, after a failure or when a Router died, has the same `id`. More may be said of a
    sink by attributes of it: `on`, the ends that it wants to hear of (`("SUCCESS",)`; there are DEAD, EXPIRED, REVOKED
    and REJECTED, too); `batch`, how many documents at most (100); `timeout`, how many seconds it may take (30);
    `retry`, a RetryPolicy for each document that fails alone (10 retries, from 1 s on, at most 5 min); after that it is
    in the dead-letter queue. A method `close` is called when a Router stops, a method `check` before one starts: it
    raises Misconfigured when the sink could never take anything there.
    """

    @property
    def name(self) -> str:
        """What it is known by, to all Routers and over restarts."""
        ...

    def write(self, documents: Sequence[ResultDocument], /) -> Any:
        """Take these."""
        ...


class RedisResults:
    """Results in Redis, where `get` finds them: what there is without any sink, too. `ttl` is for how long, in seconds
    or as a timedelta, like the option `results_ttl`."""

    name = "redis"

    def __init__(self, *, ttl: float | timedelta | None = None) -> None:
        self.ttl = ttl


@dataclass(frozen=True, slots=True, eq=False)
class SinkOptions:
    """A sink, and what is said of it."""

    sink: Sink
    name: str
    states: tuple[ResultState, ...]
    batch: int
    timeout: float
    retry: RetryPolicy
    is_async: bool


def get_sink_options(sink: Any) -> SinkOptions:
    """What is said of a sink. Raises Misconfigured for what is none, or says what makes no sense."""
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
    return SinkOptions(sink, name, on, batch, timeout, retry, inspect.iscoroutinefunction(write))


def _takes_one(write: Callable[..., Any]) -> bool:
    """Whether it may be called with one argument; of what is not written in Python that is not known."""
    try:
        inspect.signature(write).bind(())
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def check_sinks(outlets: Collection[SinkOptions]) -> None:
    """Ask each sink whether it could work here. Raises Misconfigured when one says that it never could."""
    for each in outlets:
        check = getattr(each.sink, "check", None)
        if callable(check):
            check()


def parse_sinks(sinks: Any, task: str) -> tuple[tuple[SinkOptions, ...], RedisResults | None]:
    """The sinks of a task, and what is said of its results in Redis. Raises Misconfigured."""
    if isinstance(sinks, str) or not isinstance(sinks, Sequence):
        raise Misconfigured(f"task {task}: sinks is {sinks!r}; give a list of sinks")
    said = cast("Sequence[Any]", sinks)
    outlets = tuple(get_sink_options(each) for each in said if not isinstance(each, RedisResults))
    names = [each.name for each in outlets]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise Misconfigured(f"task {task} has two sinks named {twice[0]!r}: give one another name")
    return outlets, next((each for each in said if isinstance(each, RedisResults)), None)


class SinkedTask(Protocol):
    """A task, as far as its results go to sinks."""

    sinks: tuple[SinkOptions, ...]
    recipients: Mapping[str, str] | None

    @property
    def name(self) -> str:
        """Its name."""
        ...


def get_all_sink_options(tasks: Collection[SinkedTask]) -> tuple[SinkOptions, ...]:
    """All sinks of an application. Raises Misconfigured when two different ones have one name."""
    found: dict[str, SinkOptions] = {}
    for task in tasks:
        for each in task.sinks:
            known = found.setdefault(each.name, each)
            if known.sink is not each.sink:
                raise Misconfigured(
                    f"two sinks are named {each.name!r}: give one another name, or use one object"
                )
    return tuple(found.values())


def get_sink_names(tasks: Iterable[SinkedTask]) -> list[str]:
    """The names of all their sinks, in order."""
    return sorted({each.name for task in tasks for each in task.sinks})


def get_all_recipients(tasks: Collection[SinkedTask]) -> Mapping[str, str]:
    """Which sinks take which documents, by end and task, as `declare_recipients.lua` is told. Nothing when no task
    has a sink."""
    if not any(task.recipients for task in tasks):
        return {}
    ends: tuple[ResultState, ...] = ("DEAD", "REVOKED")  # of the others a worker knows that has the task
    return {f"{end} {task.name}": (task.recipients or {}).get(end, "") for task in tasks for end in ends}
