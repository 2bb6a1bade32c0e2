"""Data Sources, which publish documents, and the tasks that subscribe to them."""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict, TypeVar, Unpack, cast, overload

from celery5.errors import Misconfigured
from celery5.protocol.annotations import refuse_injected
from celery5.protocol.events.documents import SourceDocument
from celery5.protocol.job.arguments import Parameters
from celery5.protocol.task_kinds import EventLoop, check_loop

REMEMBER = 86400.0
"""The default for the seconds that the id of a document is stored."""


class SourcedTask(Protocol):
    """The properties of a task that concern sources."""

    sources: "tuple[Source, ...]"

    def add_source(self, source: "Source") -> None:
        """Subscribe to a source. Raises Misconfigured."""
        ...


T = TypeVar("T", bound=SourcedTask)


class Emit(Protocol):
    """The function with which a source publishes documents."""

    async def __call__(
        self,
        body: object,
        /,
        *,
        id: str = "",  # noqa: A002  the name of the field
        attributes: Mapping[str, str] | None = None,
    ) -> str:
        """Publish a document to all subscribed tasks; return the document's id.

        It returns when the document is published, so the source may acknowledge it then.

        Args:
            body: Bytes, text, or anything that has a JSON form.
            id: With an id the document is published once, however often it is emitted. After an interruption or a
                failure some tasks may lack it: emitting the same id again sends it to the rest.
            attributes: Texts about the document, by name.

        Raises:
            BrokerUnavailable: The broker cannot be reached.
            MessageTooLarge: The document exceeds the limit.
            BadArguments: The body has no JSON form.
        """
        ...


class Source:
    """A Data Source: it has a name, and runs in Routers.

    Args:
        run: One of these:

            - a class, instantiated at each start, or an object, with `async def run(self, emit)`, which runs until
              cancelled and calls `await emit(body, id=...)`;
            - an `async def` with the parameter `emit`;
            - an async generator function that yields bodies or `SourceDocument`s;
            - a `def`, run in a thread, that returns a list of those or yields them.
        name: By default that of the class or function.
        every: Seconds after which a run that has ended is repeated; required for a `def`.
        single: Run in one Router at a time; when it dies another one takes over. Else it runs in each.
        remember: Seconds for which a document's id is stored, so that the document is not published again.
        loop: The event loop of `async def` code; by default that of the application.

    Raises:
        Misconfigured: An argument makes no sense.
    """

    def __init__(
        self,
        run: Any,
        *,
        name: str = "",
        every: float | None = None,
        single: bool = False,
        remember: float = REMEMBER,
        loop: EventLoop | None = None,
    ) -> None:
        self.name: str = name or _make_name(run)
        if not re.fullmatch(r"[^\s{}:,]{1,100}", self.name):
            raise Misconfigured(
                f"source name {self.name!r}: use 1 to 100 characters without spaces, commas, braces or colons"
            )
        refuse_injected(run, f"source {self.name!r}")
        self.run = run
        self.kind: SourceKind = _get_kind(run, self.name)
        self.every: float | None = _check_seconds(every, "every", self.name)
        self.single = single
        if loop is not None:
            check_loop(loop, f"source {self.name!r}")
        if loop == "asyncio" and self.kind == "function":
            raise Misconfigured(f"source {self.name!r} is not async: loop='asyncio' is for async def")
        self.loop: EventLoop | None = loop
        self.remember: float = _check_seconds(remember, "remember", self.name) or REMEMBER
        if self.kind == "function" and self.every is None:
            raise Misconfigured(
                f"source {self.name!r} is a function that ends: say how often it runs, every=5.0"
            )

    def __repr__(self) -> str:
        return f"<Source {self.name}>"

    def subscribe(self, task: T) -> T:
        """Subscribe `task` to the documents, as `@app.task(source=...)` does. Raises Misconfigured."""
        task.add_source(self)
        return task


SourceKind = Literal["coroutine", "generator", "function"]
"""The kind of `run`: a coroutine function with `emit`, an async generator, or a plain function for a thread."""


class SourceOptions(TypedDict, total=False):
    """The options of `@app.source(...)`: see `Source`."""

    name: str
    every: float | None
    single: bool
    remember: float
    loop: EventLoop | None


class DeclareSource:
    """The decorators `@app.source` and `celery5.source`, which work with and without options, or as a function."""

    @overload
    def __call__(self, run: Any, /, **options: Unpack[SourceOptions]) -> Source: ...
    @overload
    def __call__(self, **options: Unpack[SourceOptions]) -> Callable[[Any], Source]: ...
    def __call__(self, run: Any = None, /, **options: Any) -> Any:  # type: ignore[misc]  # pyright: ignore[reportInconsistentOverload]
        """Declare a Data Source, with the options of `Source`. Raises Misconfigured."""
        unknown = sorted(set(options) - set(SourceOptions.__annotations__))
        if unknown:
            raise Misconfigured(f"a source takes name, every, single, remember and loop, not {unknown[0]!r}")

        def declare(run: Any) -> Source:
            return Source(run, **options)

        return declare if run is None else declare(run)


source: DeclareSource = DeclareSource()
"""Declare a Data Source: `@source(every=5.0)`, or `inbox = source(Watcher("inbox"), name="inbox")`."""


def parse_sources(option: Any, parameters: Parameters, task: str) -> tuple[Source, ...]:
    """Return the sources that a task subscribes to. Raises Misconfigured."""
    sources = cast("Sequence[Any]", option) if isinstance(option, list | tuple) else (option,)
    for value in sources:
        if not isinstance(value, Source):
            raise Misconfigured(f"task {task}: source is {value!r}; give what @app.source has made")
    if sources:
        try:
            parameters.encode((_ANY_DOCUMENT,), {})
        except Exception as error:
            raise Misconfigured(
                f"task {task} cannot take a SourceDocument as its one argument: {error}"
            ) from None
    return tuple(dict.fromkeys(sources))


def group_by_source(tasks: Iterable[T]) -> dict[Source, list[T]]:
    """Return the tasks that subscribe to each source. Raises Misconfigured when two sources have the same name."""
    tasks_by_source: dict[Source, list[T]] = {}
    names: dict[str, Source] = {}
    for task in tasks:
        for source in task.sources:
            if names.setdefault(source.name, source) is not source:
                raise Misconfigured(f"two sources are named {source.name!r}: give one another name")
            tasks_by_source.setdefault(source, []).append(task)
    return tasks_by_source


def _make_name(run: Any) -> str:
    name = str(getattr(run, "__name__", type(run).__name__))
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", "-", name).lower().strip("-<>")


def _get_kind(run: Any, name: str) -> SourceKind:
    method = getattr(run, "run", None)
    if inspect.isasyncgenfunction(run):
        return "generator"
    if inspect.iscoroutinefunction(run) or inspect.iscoroutinefunction(method):
        return "coroutine"
    if callable(run) and not isinstance(run, type):
        return "function"
    raise Misconfigured(
        f"source {name!r}: {run!r} is none: give a class with async def run(self, emit), or a function that yields"
    )


def _check_seconds(value: Any, option: str, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise Misconfigured(f"source {name!r}: {option} is {value!r}; give seconds, more than 0")
    return float(value)


_ANY_DOCUMENT = SourceDocument(body=b"")
