"""Control commands: the guide and the CLI have exactly those that are defined, with the same names and help."""

from pathlib import Path

import pytest

from celery5.cli.commands.control import COMMANDS
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
    commands = {each.name: each for each in COMMANDS}
    usages = {each.cli_usage.split()[0]: each for each in COMMAND_DEFINITIONS.values() if each.cli_usage}
    assert commands.keys() == usages.keys() | {"tell"}
    for name, definition in usages.items():
        if name == definition.name:
            assert commands[name].help == definition.help


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
