"""Declare an application's own control commands: `@app.command`.

They use the same inbox as all others, are signed, and are answered in the same way.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar, overload

import msgspec

from celery5.errors import CommandRefused, Misconfigured
from celery5.protocol.commands.definitions import COMMAND_DEFINITIONS
from celery5.protocol.masking import show_error
from celery5.protocol.task_kinds import EventLoop, FunctionKind, choose_kind
from celery5.runners.surrounding import surround_call

F = TypeVar("F", bound=Callable[..., Any])
OwnCommandHandler = Callable[[Mapping[str, Any]], Awaitable[object]]
CallOnAsyncio = Callable[[Callable[[], Awaitable[object]]], Awaitable[object]]
"""Calls a function in the asyncio loop of the process, and returns what it returns."""

RESERVED_COMMANDS = frozenset(
    name for name, definition in COMMAND_DEFINITIONS.items() if definition.is_reserved
)
"""Names of the commands of all workers, which no own command may have."""
_NAME = re.compile(r"[a-z][a-z0-9-]{0,99}\Z")


class CommandFunction(msgspec.Struct, frozen=True):
    """A command of an application: its function, and where that runs."""

    function: Callable[..., Any]
    kind: FunctionKind


class DeclareCommand:
    """The decorator `@app.command`, which works with and without arguments."""

    def __init__(self, default_loop: EventLoop = "trio") -> None:
        self.default_loop: EventLoop = default_loop
        self.known: dict[str, CommandFunction] = {}

    @overload
    def __call__(self, function: F, /) -> F: ...
    @overload
    def __call__(self, *, name: str | None = None, loop: EventLoop | None = None) -> Callable[[F], F]: ...
    def __call__(
        self,
        function: Callable[..., Any] | None = None,
        *,
        name: str | None = None,
        loop: EventLoop | None = None,
    ) -> Any:
        """Declare a command that runs `function` in the application's workers.

        The parameters of the function are those of the command; what it returns is the answer, and must have a JSON
        form. An `async def` runs in the event loop `loop` beside the jobs, a `def` in a thread; each may take 30
        seconds. It raises CommandRefused to refuse a command.

        Args:
            name: The name of the command; by default that of the function, with `-` for `_`.
            loop: The event loop of an `async def`; by default that of the application.

        Raises:
            Misconfigured: The name is invalid or taken, `function` is no function, or `loop` is none for it.
        """

        def declare(function: Any) -> Any:
            if not callable(function):
                raise Misconfigured(f"@command takes a function, got {function!r}")
            self._add(
                name or str(getattr(function, "__name__", "")).strip("_").replace("_", "-"), function, loop
            )
            return function

        return declare if function is None else declare(function)

    def _add(self, name: str, function: Callable[..., Any], loop: EventLoop | None) -> None:
        if not _NAME.match(name):
            raise Misconfigured(f"command {name!r}: a name has small letters, digits and -")
        if name in RESERVED_COMMANDS:
            raise Misconfigured(f"command {name!r}: all workers have one of that name; take another")
        own = CommandFunction(function, choose_kind(function, loop, self.default_loop, f"command {name!r}"))
        if self.known.setdefault(name, own).function is not function:
            raise Misconfigured(f"two commands are named {name!r}")


def make_own_handlers(
    known: Mapping[str, CommandFunction], call_on_asyncio: CallOnAsyncio
) -> dict[str, OwnCommandHandler]:
    """Return the handlers of own commands, by name."""
    return {name: _handler(name, own, call_on_asyncio) for name, own in known.items()}


def _handler(name: str, own: CommandFunction, call_on_asyncio: CallOnAsyncio) -> OwnCommandHandler:
    async def handle(parameters: Mapping[str, Any]) -> object:
        try:
            inspect.signature(own.function).bind(**parameters)
        except TypeError as error:
            raise CommandRefused(f"{name}: {error}") from None
        try:
            return await _call(own.kind, partial(own.function, **parameters), call_on_asyncio)
        except Exception:
            raise
        except BaseException as error:  # a command must not end the worker
            from celery5.runners.user_errors import reraise_cancellation

            reraise_cancellation(error)
            raise RuntimeError(f"{name} raised {show_error(error)}") from None

    return handle


async def _call(kind: FunctionKind, function: Callable[[], Any], call_on_asyncio: CallOnAsyncio) -> object:
    from celery5.runners.user_errors import call_in_thread, call_user_code  # only workers get here

    if kind == "asyncio":
        return await call_on_asyncio(function)
    if kind == "trio":
        return await call_user_code(function)
    return await call_in_thread(surround_call(function, "thread"))
