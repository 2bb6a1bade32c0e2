"""Commands: what this process does when it is told to, by name, whoever tells it: its inbox, itself, a test."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from celery5.errors import CommandRefused
from celery5.protocol.similar_names import did_you_mean

CommandHandler = Callable[[Mapping[str, Any]], Awaitable[object]]
"""Takes a command's parameters, gives an answer that has a JSON form. Raises CommandRefused when it will not."""


class SelfCommandSender(Protocol):
    """Posts a command to this very process: through its inbox, so that it outlives the process, else directly."""

    async def send(self, command: str, parameters: Mapping[str, Any], /) -> None: ...


class CommandRegistry:
    """The commands of one process, by name."""

    def __init__(self, *, handlers: Mapping[str, CommandHandler]) -> None:
        self._handlers = handlers

    @property
    def names(self) -> tuple[str, ...]:
        """All commands that there are."""
        return tuple(sorted(self._handlers))

    async def perform(self, command: str, parameters: Mapping[str, Any]) -> object:
        """Do it, and give the answer. Raises CommandRefused for one that is not known, or will not be done."""
        handler = self._handlers.get(command)
        if handler is None:
            meant = did_you_mean(command, self._handlers, otherwise=f"known: {', '.join(self.names)}")
            raise CommandRefused(f"command {command!r} is not known here; {meant}")
        return await handler(parameters)


class ImmediateCommands:
    """Performs a command in this process at once: what there is instead of an inbox."""

    def __init__(self, *, commands: CommandRegistry) -> None:
        self._commands = commands

    async def send(self, command: str, parameters: Mapping[str, Any], /) -> None:
        """Perform it; nobody waits for its answer. Raises CommandRefused."""
        await self._commands.perform(command, parameters)
