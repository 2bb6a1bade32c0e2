"""Define what a page is: it asks operations for what it shows, as the user who looks at it."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import anyio
import msgspec

from celery5.dashboard.access import User
from celery5.dashboard.performing import Performer
from celery5.operations.table import OPERATIONS
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error

T = TypeVar("T")

DECLARED = "what tasks declare"
"""The part of a page that is missing if a module of `include` fails while it is imported."""


class PageRequest(msgspec.Struct, frozen=True):
    """One look at a page.

    Args:
        app: The name of the application.
        path: The values in its path, by name.
        query: The parameters of its address, by name; of several values the last.
        user: Who looks.
        performer: Performs the operations.
        problems: What cannot be shown of the page, and why.
    """

    app: str
    path: Mapping[str, str]
    query: Mapping[str, str]
    user: User
    performer: Performer
    # What cannot be shown of the page, and why.
    problems: list[str] = msgspec.field(default_factory=list[str])

    async def read(self, operation: str, **parameters: Any) -> Any:
        """Return the result of an operation. Parameters that are '' or None are left out. Raises what it raises."""
        given = {name: value for name, value in parameters.items() if value not in ("", None)}
        return await self.performer.perform(self.app, OPERATIONS[operation], given, self.user, is_text=True)

    async def read_part(self, what: str, operation: str, default: T, **parameters: Any) -> T:
        """Return the result of an operation for a part of the page; `default` when it fails, and the page says so.

        Args:
            what: The part in words: `the alerts`.
        """
        try:
            result: T = await self.read(operation, **parameters)
        except Exception as error:
            self.problems.append(f"{what} cannot be shown: {describe_error(error, MAX_ERROR_LENGTH)}")
            return default
        return result

    async def read_together(self, *operations: str, **parameters: Any) -> list[Any]:
        """Return the results of operations with the same parameters, read at the same time. Raises what one raises."""
        results: dict[str, Any] = {}
        errors: list[Exception] = []

        async def read(operation: str) -> None:
            try:
                results[operation] = await self.read(operation, **parameters)
            except Exception as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            for operation in operations:
                tasks.start_soon(read, operation)
        if errors:
            raise errors[0]
        return [results[operation] for operation in operations]

    def wants(self, part: str) -> bool:
        """Return whether the address asks for a part of the page that is not always shown."""
        return self.query.get(part) == "true"

    def choose(self, *names: str) -> dict[str, str]:
        """Return those parameters of the address that are given and not empty."""
        return {name: self.query[name] for name in names if self.query.get(name)}


Load = Callable[[PageRequest], Awaitable[Mapping[str, Any]]]


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A page of one application.

    Args:
        path: Below the application: `queues`, `queues/{queue}`.
        template: The template that shows it.
        title: Its title; `{queue}` stands for a value of the path.
        load: Returns what the template shows.
        nav: Its entry in the navigation; '' for none. A page below another marks the entry of that.
        refresh: Seconds after which a script shows it anew; 0: it does not change by itself.
    """

    path: str
    template: str
    title: str
    load: Load
    nav: str = ""
    refresh: float = 2.0
