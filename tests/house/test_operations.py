"""Operations: each is on every surface, and each parameter says what it is."""

from collections.abc import Iterator, Mapping

import click
import pytest

from celery5.cli.main import cli
from celery5.operations.operation import Operation
from celery5.operations.parameters import list_parameters
from celery5.operations.table import OPERATIONS

ELSEWHERE: Mapping[str, str] = {
    # A page of its own that shows more than the operation: see the command's module.
    "info:show": "info",
    "top:show": "top",
    "doctor:run": "doctor",
    # Dead records are dead letters with --stream and --group.
    "dlq:read-records": "dlq read",
    "dlq:replay-records": "dlq replay",
    "dlq:purge-records": "dlq purge",
    # Sent to workers by a command that takes any.
    "worker:health": "worker tell",
    "worker:prefetch": "worker tell",
    "worker:concurrency": "worker tell",
    # Sent to Controllers by the autoscaler; people set the setting.
    "controller:scale": "controller start",
    # The names are completed by the shell, and `worker run` lists them.
    "task:list": "task send",
}
"""Operations without a command of their own, and the command that does the same."""


def list_commands(group: click.Group, *path: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from list_commands(command, *path, name)
        elif command is not None:
            yield " ".join((*path, name)), command


COMMANDS = dict(list_commands(cli))


def test_each_operation_has_a_command_of_its_name() -> None:
    commands = {name: ELSEWHERE.get(name, name.replace(":", " ")) for name in OPERATIONS}
    assert {name: command for name, command in commands.items() if command not in COMMANDS} == {}


def test_no_exception_has_become_a_command() -> None:
    assert [name for name in ELSEWHERE if name.replace(":", " ") in COMMANDS] == []
    assert ELSEWHERE.keys() - OPERATIONS.keys() == set()


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda one: one.name)
def test_each_parameter_says_what_it_is_in_forms_help_and_openapi(operation: Operation) -> None:
    assert [one.name for one in list_parameters(operation.parameters) if not one.help] == []
    assert operation.summary.endswith(".")
