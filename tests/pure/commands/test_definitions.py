"""Control commands: the guide and the CLI have exactly those that are defined, with the same names and help."""

from pathlib import Path

import click
import pytest

from celery5.cli.commands.worker import worker
from celery5.commands.declaration import RESERVED_COMMANDS
from celery5.errors import CommandRefused
from celery5.protocol.commands.definitions import (
    COMMAND_DEFINITIONS,
    PAUSE_QUEUE,
    PING,
    WORKERS,
    CommandDefinition,
    list_commands,
)

GUIDE = Path(__file__).parents[3] / "docs/guide/control.md"


def row(definition: CommandDefinition) -> str:
    parameters = ", ".join(
        f"`{each.name}`{'' if each.is_required else '?'}" for each in definition.parameters
    )
    usage = definition.cli_usage or f"tell {definition.name}"
    return f"| `{definition.name}` | {parameters} | `{usage}` | {definition.help} |"


def test_the_guide_lists_each_command_of_a_worker_as_it_is_defined() -> None:
    rows = [
        row(each)
        for each in COMMAND_DEFINITIONS.values()
        if each.recipients >= WORKERS and each.permission != "internal"
    ]
    table = GUIDE.read_text().partition("| command | parameters |")[2].partition("\n\n")[0].splitlines()[2:]
    assert table == rows


def test_the_cli_has_the_commands_with_their_names_and_help() -> None:
    usages = {each.cli_usage.split()[0]: each for each in COMMAND_DEFINITIONS.values() if each.cli_usage}
    assert worker.commands.keys() == usages.keys() | {"tell", "start", "list"}
    for name, definition in usages.items():
        assert (worker.commands[name].help or "").startswith(definition.help)


def test_the_arguments_and_flags_of_the_cli_are_the_parameters_that_are_defined() -> None:
    of_every_command = {"--to", "--timeout", "--json"}
    for definition in COMMAND_DEFINITIONS.values():
        if not definition.cli_usage:
            continue
        name, *usage = definition.cli_usage.split()
        parameters = worker.commands[name].params
        arguments = [each for each in parameters if isinstance(each, click.Argument)]
        flags = {each.opts[0] for each in parameters if isinstance(each, click.Option)}
        written = [word for word in usage if word.strip("[]").isupper()]
        for argument in arguments:
            word = argument.metavar or (argument.name or "").upper()
            assert (word if argument.required else f"[{word}]") in written
            if name == definition.name:
                required = {each.name: each.is_required for each in definition.parameters}
                assert required[word.lower()] is argument.required
        written_flags = {word.strip("[]") for word in usage if "--" in word}
        # `--kwargs` is left out of a usage that has to fit in a line of a table.
        assert written_flags - of_every_command == flags - of_every_command - {"--kwargs"}


def test_an_application_may_not_take_the_name_of_a_command_of_workers() -> None:
    assert list_commands("worker") == RESERVED_COMMANDS


def test_a_parameter_that_a_command_does_not_take_is_refused() -> None:
    PAUSE_QUEUE.check_parameters({"queue": "default", "here": True})
    with pytest.raises(CommandRefused, match="'que' is not known; it takes queue, here"):
        PAUSE_QUEUE.check_parameters({"que": "default"})
    with pytest.raises(CommandRefused, match="'x' is not known; it takes none"):
        PING.check_parameters({"x": 1})


def test_a_command_that_only_reads_is_safe_to_repeat_unless_its_name_is_free() -> None:
    for each in COMMAND_DEFINITIONS.values():
        assert each.is_idempotent or each.permission != "read" or not each.is_reserved
