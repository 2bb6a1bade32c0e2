"""Sources: where documents come from: what a Data Source is, and who subscribes to it (C85)."""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict, TypeVar, Unpack, cast, overload

from celery5.errors import Misconfigured
from celery5.protocol.events.documents import SourceDocument
from celery5.protocol.job.arguments import Parameters

REMEMBER = 86400.0
"""Seconds that the id of a document is remembered, unless its source says otherwise."""


class SourcedTask(Protocol):
    """A task, as far as it is sent the documents of sources."""

    sources: "tuple[Source, ...]"

    def add_source(self, source: "Source") -> None:
        """Subscribe to a source. Raises Misconfigured."""
        ...


T = TypeVar("T", bound=SourcedTask)


class Emit(Protocol):
    """Publishes a document: what a source is handed."""

    async def __call__(
        self,
        body: object,
        /,
        *,
        id: str = "",  # noqa: A002  as everywhere
        attributes: Mapping[str, str] | None = None,
    ) -> str:
        """Publish `body`, bytes, or text, or anything that has JSON, to all tasks that have subscribed; gives the
        document's id.

        It returns when it is published, and not before: whoever sent it may be told so then. With an `id` it is
        published once, however often that comes; interrupted or failed, it may have been published to some of the
        tasks, and the same id makes up for the others. `attributes` are words about it. Raises BrokerUnavailable,
        MessageTooLarge, and BadArguments for what has no JSON.
        """
        ...


class Source:
    """A Data Source: it has a name, and runs in Routers.

    `run` is one of these: a class, made anew for each start, or an object, with `async def run(self, emit)`, which
    stays and calls `await emit(body, id=...)`; an `async def` with the parameter `emit`; an async generator function
    that yields bodies, or a `SourceDocument` where there is more to say; or a `def` that gives a list of those, or
    yields them, in a thread. `every`: seconds after which what has ended is run again; a function needs it. `single`:
    it runs in one Router at a time; when that dies another takes over. Else it runs in each. `remember`: seconds for
    which the id of a document is known, so that it is not published again. Raises Misconfigured.
    """

    def __init__(
        self,
        run: Any,
        *,
        name: str = "",
        every: float | None = None,
        single: bool = False,
        remember: float = REMEMBER,
    ) -> None:
        self.name: str = name or _name_of(run)
        if not re.fullmatch(r"[^\s{}:,]{1,100}", self.name):
            raise Misconfigured(
                f"source name {self.name!r}: use 1 to 100 characters without spaces, commas, braces or colons"
            )
        self.run = run
        self.kind: Kind = _kind_of(run, self.name)
        self.every: float | None = _seconds(every, "every", self.name)
        self.single = single
        self.remember: float = _seconds(remember, "remember", self.name) or REMEMBER
        if self.kind == "polls" and self.every is None:
            raise Misconfigured(
                f"source {self.name!r} is a function that ends: say how often it runs, every=5.0"
            )

    def __repr__(self) -> str:
        return f"<Source {self.name}>"

    def subscribe(self, task: T) -> T:
        """Have `task` given each document from now on: what `@app.task(source=...)` says. Raises Misconfigured."""
        task.add_source(self)
        return task


Kind = Literal["stays", "yields", "polls"]
"""What is run: something that is handed `emit`, an async generator, or a plain function in a thread."""


class SourceOptions(TypedDict, total=False):
    """What `@app.source(...)` takes: see `Source`."""

    name: str
    every: float | None
    single: bool
    remember: float


class DeclareSource:
    """What `@app.source` and `celery5.source` are: a decorator that works bare and called, and a function."""

    @overload
    def __call__(self, run: Any, /, **said: Unpack[SourceOptions]) -> Source: ...
    @overload
    def __call__(self, **said: Unpack[SourceOptions]) -> Callable[[Any], Source]: ...
    def __call__(self, run: Any = None, /, **said: Any) -> Any:  # type: ignore[misc]  # pyright: ignore[reportInconsistentOverload]
        """Declare a Data Source; what it takes is Source's. Raises Misconfigured."""
        unknown = sorted(set(said) - set(SourceOptions.__annotations__))
        if unknown:
            raise Misconfigured(f"a source takes name, every, single and remember, not {unknown[0]!r}")

        def declared(run: Any) -> Source:
            return Source(run, **said)

        return declared if run is None else declared(run)


source: DeclareSource = DeclareSource()
"""Declare a Data Source: `@source(every=5.0)`, or `inbox = source(Watcher("inbox"), name="inbox")`."""


def parse_sources(said: Any, parameters: Parameters, task: str) -> tuple[Source, ...]:
    """The sources that a task subscribes to. Raises Misconfigured."""
    several = cast("Sequence[Any]", said) if isinstance(said, list | tuple) else (said,)
    for each in several:
        if not isinstance(each, Source):
            raise Misconfigured(f"task {task}: source is {each!r}; give what @app.source has made")
    if several:
        try:
            parameters.encode((_ANY,), {})
        except Exception as error:
            raise Misconfigured(
                f"task {task} cannot take a SourceDocument as its one argument: {error}"
            ) from None
    return tuple(dict.fromkeys(several))


def group_by_source(tasks: Iterable[T]) -> dict[Source, list[T]]:
    """Which tasks have subscribed to which sources. Raises Misconfigured when two sources have one name."""
    found: dict[Source, list[T]] = {}
    names: dict[str, Source] = {}
    for task in tasks:
        for each in task.sources:
            if names.setdefault(each.name, each) is not each:
                raise Misconfigured(f"two sources are named {each.name!r}: give one another name")
            found.setdefault(each, []).append(task)
    return found


def _name_of(run: Any) -> str:
    called = str(getattr(run, "__name__", type(run).__name__))
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", "-", called).lower().strip("-<>")


def _kind_of(run: Any, name: str) -> Kind:
    method = getattr(run, "run", None)
    if inspect.isasyncgenfunction(run):
        return "yields"
    if inspect.iscoroutinefunction(run) or inspect.iscoroutinefunction(method):
        return "stays"
    if callable(run) and not isinstance(run, type):
        return "polls"
    raise Misconfigured(
        f"source {name!r}: {run!r} is none: give a class with async def run(self, emit), or a function that yields"
    )


def _seconds(value: Any, what: str, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise Misconfigured(f"source {name!r}: {what} is {value!r}; give seconds, more than 0")
    return float(value)


_ANY = SourceDocument(body=b"")
