"""Run the control commands of a process by name, whether its inbox, the process itself or a test sends them."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from celery5.errors import CommandRefused
from celery5.protocol.commands.definitions import CommandDefinition
from celery5.similar_names import did_you_mean

CommandHandler = Callable[[Mapping[str, Any]], Awaitable[object]]
"""Takes the parameters of a command and returns an answer that has a JSON form. Raises CommandRefused."""


P = TypeVar("P", bound=msgspec.Struct)


def handle(
    definition: CommandDefinition[P], handler: Callable[[P], Awaitable[object]]
) -> dict[str, CommandHandler]:
    """Return the handler of a command by the command's name. It gets the parameters checked and typed."""

    async def parse_and_handle(parameters: Mapping[str, Any]) -> object:
        return await handler(definition.parse(parameters))

    return {definition.name: parse_and_handle}


class SelfCommandSender(Protocol):
    """Sends a command of this process to itself."""

    async def send(self, command: str, parameters: Mapping[str, Any], /) -> None: ...


class CommandRegistry:
    """The commands of one process, by name."""

    def __init__(self, *, handlers: Mapping[str, CommandHandler]) -> None:
        self._handlers = handlers

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all commands."""
        return tuple(sorted(self._handlers))

    async def perform(self, command: str, parameters: Mapping[str, Any]) -> object:
        """Run a command and return its answer. Raises CommandRefused, also for an unknown command."""
        handler = self._handlers.get(command)
        if handler is None:
            suggestion = did_you_mean(command, self._handlers, otherwise=f"known: {', '.join(self.names)}")
            raise CommandRefused(f"command {command!r} is not known here; {suggestion}")
        return await handler(parameters)


class ImmediateCommands:
    """Runs commands of this process to itself at once, where it has no inbox."""

    def __init__(self, *, commands: CommandRegistry) -> None:
        self._commands = commands

    async def send(self, command: str, parameters: Mapping[str, Any], /) -> None:
        """Run the command and drop its answer. Raises CommandRefused."""
        await self._commands.perform(command, parameters)
