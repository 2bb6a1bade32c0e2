"""Declare resources: what each worker opens once, and tasks get by an annotated parameter."""

import functools
import inspect
import math
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from contextlib import (
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from typing import Any, cast, get_args, get_origin

from celery5.errors import Misconfigured
from celery5.protocol.annotations import Injectable, contradicts, find_injected, refuse_injected, resolve_hint
from celery5.protocol.job.retry_policy import RetryPolicy
from celery5.protocol.scaling.resource_budget import NOTHING, Amounts, parse_size
from celery5.protocol.task_kinds import EventLoop, FunctionKind, check_loop
from celery5.runners.open_resources import find_resource, find_resource_async


class _Injected:
    def __repr__(self) -> str:
        return "INJECTED"


INJECTED: Any = _Injected()
"""The default of a parameter that gets a resource: type checkers then know that callers leave it out."""
OPEN_RETRIES = RetryPolicy(max_retries=5, backoff=1.0, cap=60.0)


class Resource(Injectable):
    """Something that each worker process opens once, such as a pool, a client or a model.

    Tasks get it by an annotated parameter, which callers leave out: `bank: Annotated[Bank, Resource(open_bank)]`. Two
    that are made with the same arguments are one.

    Args:
        open: What opens it, one of these; `async` ones run in an event loop, others in a thread:

            - a generator function that yields it, with or without the decorator of a context manager. What follows the
              `yield` closes it;
            - a class with the methods of a context manager;
            - a function that returns it. Nothing closes it.
        name: Its name in the log; by default that of `open`.
        loop: The event loop in which it is opened; by default that of the task that needs it, so that tasks on Trio and
            on asyncio each get their own. With a loop, a function that is not `async`, such as a lambda, is to return
            an asynchronous context manager.
        check: Called with it, again and again, in its event loop or thread. When this returns False or raises, the
            resource is closed, and opened again by the retry policy.
        check_interval: Seconds between two checks.
        retry: The retry policy of opening it. By default five retries; then the worker ends.
        size: What it takes of the worker's capacity while it is open: `{"vram_gb": 7.5}`. It is opened when a job needs
            it, and may be closed while none does, since another job or resource needs its space.

    Raises:
        Misconfigured: An argument makes no sense.
    """

    def __init__(
        self,
        open: Callable[..., Any],  # noqa: A002  the word for it
        *,
        name: str = "",
        loop: EventLoop | None = None,
        check: Callable[[Any], Any] | None = None,
        check_interval: float = 10.0,
        retry: RetryPolicy | Mapping[str, Any] | None = None,
        size: Mapping[str, float] | None = None,
    ) -> None:
        if not callable(open):
            raise Misconfigured(f"Resource({open!r}): give a function or a class that opens it")
        self.open: Callable[..., Any] = open
        self.name: str = name or str(getattr(open, "__name__", type(open).__name__))
        where = f"resource {self.name!r}"
        refuse_injected(open, where)
        refuse_injected(check, f"{where}: check")
        if loop is not None:
            check_loop(loop, where)
        self.loop: EventLoop | None = loop
        self.is_async: bool = loop is not None or _is_async(open)
        if check is not None and inspect.iscoroutinefunction(check) and not self.is_async:
            raise Misconfigured(f"{where} is opened in a thread: its check is to be a def, too")
        self.check: Callable[[Any], Any] | None = check
        if isinstance(check_interval, bool) or not 0 < check_interval <= MAX_CHECK_INTERVAL:
            raise Misconfigured(f"{where}: check_interval is {check_interval!r}: give seconds, up to a day")
        self.check_interval: float = float(check_interval)
        try:
            self.retry: RetryPolicy = OPEN_RETRIES if retry is None else RetryPolicy.parse(retry)
        except Misconfigured as error:
            raise Misconfigured(f"{where}: {error}") from None
        self.size: Amounts = NOTHING if size is None else parse_size(size, f"{where}: size")

    def __repr__(self) -> str:
        return f"<Resource {self.name}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Resource) and self._list_arguments() == other._list_arguments()

    def __hash__(self) -> int:
        return hash((self.open, self.name, self.loop))

    def _list_arguments(self) -> tuple[object, ...]:
        return (self.open, self.name, self.loop, self.check, self.check_interval, self.retry, self.size)

    def get_kind(self, task_kind: FunctionKind) -> FunctionKind:
        """Return where it is opened for a task: in an event loop, or in a thread."""
        return (self.loop or task_kind) if self.is_async else "thread"

    def find_type(self) -> Any:
        """Return the type of the opened resource, from the annotations of `open`; Any if they do not say."""
        opener: Any = inspect.unwrap(self.open)
        if isinstance(opener, type):
            is_context = hasattr(opener, "__enter__") or hasattr(opener, "__aenter__")
            return Any if is_context else opener
        returned = resolve_hint(getattr(opener, "__annotations__", {}).get("return", Any), opener)
        if inspect.isgeneratorfunction(opener) or inspect.isasyncgenfunction(opener):
            return (*get_args(returned), Any)[0]
        is_opened_later = self.is_async and not inspect.iscoroutinefunction(
            opener
        )  # it returns a context manager
        return Any if is_opened_later else returned

    def enter(self) -> Any:
        """Return the context manager that opens it: an asynchronous one where `is_async`. Raises what `open` raises."""
        opener = self.open
        is_decorated = inspect.unwrap(opener) is not opener
        if inspect.isgeneratorfunction(opener) and not is_decorated:
            return contextmanager(cast("Callable[[], Generator[Any]]", opener))()
        if inspect.isasyncgenfunction(opener) and not is_decorated:
            return asynccontextmanager(cast("Callable[[], AsyncGenerator[Any]]", opener))()
        if inspect.iscoroutinefunction(opener):
            return _hold_awaited(opener)
        opened: Any = opener()
        if self.is_async and not hasattr(opened, "__aenter__"):
            raise Misconfigured(
                f"resource {self.name!r} has loop={self.loop!r}, but {opened!r} is no asynchronous context manager"
            )
        is_context = _is_generator(opener) or (isinstance(opener, type) and hasattr(opener, "__enter__"))
        return opened if self.is_async or is_context else nullcontext(opened)


MAX_CHECK_INTERVAL = 86_400.0


def _is_generator(opener: Callable[..., Any]) -> bool:
    return inspect.isgeneratorfunction(inspect.unwrap(opener))


def _is_async(opener: Callable[..., Any]) -> bool:
    plain = inspect.unwrap(opener)
    return (
        inspect.isasyncgenfunction(plain)
        or inspect.iscoroutinefunction(plain)
        or (isinstance(opener, type) and hasattr(opener, "__aenter__"))
    )


@asynccontextmanager
async def _hold_awaited(opener: Callable[[], Any]) -> AsyncGenerator[Any]:
    yield await opener()


def find_resources(function: Callable[..., Any], where: str) -> dict[str, Resource]:
    """Return the resources that a function takes, by the names of its parameters.

    Raises:
        Misconfigured: Such a parameter is not among the last ones, or its annotation contradicts that of the opener.
    """
    found: dict[str, Resource] = {}
    for name, parameter in find_injected(function).items():
        if isinstance(parameter.item, Resource):
            found[name] = parameter.item
            opened = parameter.item.find_type()
            if contradicts(opened, parameter.type):
                raise Misconfigured(
                    f"{where}: parameter {name!r} is annotated with {_get_name(parameter.type)}, and what opens its "
                    f"resource {parameter.item.name!r} with {_get_name(opened)}"
                )
    return _check_places(function, found, where) if found else found


def _get_name(kind: Any) -> str:
    return str(getattr(get_origin(kind) or kind, "__qualname__", kind))


def _check_places(
    function: Callable[..., Any], found: dict[str, Resource], where: str
) -> dict[str, Resource]:
    positional = True
    for name, parameter in reversed(list(inspect.signature(function).parameters.items())):
        if name in found:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise Misconfigured(
                    f"{where}: parameter {name!r} gets a resource by name: put it behind the /"
                )
            if not positional and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                raise Misconfigured(f"{where}: parameter {name!r} gets a resource: put it last")
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            positional = False
    return found


def inject_resources(function: Callable[..., Any], resources: Mapping[str, Resource]) -> Callable[..., Any]:
    """Return a function that calls `function` with its resources, unless the call has them.

    The signature of what is returned has no parameters for them.
    """
    signature = inspect.signature(function)
    places = {
        name: number if parameter.kind is parameter.POSITIONAL_OR_KEYWORD else math.inf
        for number, (name, parameter) in enumerate(signature.parameters.items())
        if name in resources
    }

    def list_missing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[tuple[str, Resource]]:
        return (
            (name, resources[name])
            for name, place in places.items()
            if len(args) <= place and kwargs.get(name, INJECTED) is INJECTED
        )

    def call(*args: Any, **kwargs: Any) -> Any:
        found = {name: find_resource(resource) for name, resource in list_missing(args, kwargs)}
        return function(*args, **kwargs | found)

    async def wait(*args: Any, **kwargs: Any) -> Any:
        async with AsyncExitStack() as stack:
            for name, resource in list_missing(args, kwargs):
                kwargs[name] = await find_resource_async(resource, stack)
            return await function(*args, **kwargs)

    injecting: Callable[..., Any] = wait if inspect.iscoroutinefunction(function) else call
    functools.update_wrapper(injecting, function)
    others = [parameter for name, parameter in signature.parameters.items() if name not in resources]
    vars(injecting)["__signature__"] = signature.replace(parameters=others)
    injecting.__annotations__ = {
        name: annotation for name, annotation in function.__annotations__.items() if name not in resources
    }
    return injecting


def check_loops(resources: Mapping[str, Resource], kind: FunctionKind, where: str) -> None:
    """Raise Misconfigured when a task of this kind cannot use one of its resources."""
    for resource in resources.values():
        if resource.is_async and kind == "thread":
            raise Misconfigured(
                f"{where} is a def, and its resource {resource.name!r} belongs to an event loop: open it by a def"
            )
        if resource.is_async and resource.loop not in (None, kind):
            raise Misconfigured(
                f"{where} runs on {kind}, and its resource {resource.name!r} on {resource.loop}: "
                "give both the same loop"
            )


def check_unsized(resources: Mapping[str, Resource], where: str) -> None:
    """Raise Misconfigured when a boxed task uses a resource with a size: each box opens its own, and keeps it."""
    for resource in resources.values():
        if resource.size:
            raise Misconfigured(
                f"{where} is boxed, and its resource {resource.name!r} has a size: each box opens its own, so give the "
                "size to the task, by resources="
            )
