"""The bounds of parameters: each surface refuses what is beyond one, in one line that says the bound."""

from collections.abc import Iterator
from typing import Any

import click
import pytest

from celery5.cli.main import cli
from celery5.cli.terminal.operation_commands import CommandView, make_command
from celery5.errors import Misconfigured
from celery5.operations.operation import Operation
from celery5.operations.parameters import Parameter, list_parameters
from celery5.operations.table import OPERATIONS
from celery5.protocol.durations import format_shortest
from tests.house.commands_table import list_commands

COMMANDS = dict(list_commands(cli))


def list_wrong_values(operation: Operation) -> Iterator[tuple[Parameter, Any, float]]:
    """Yield for each bound of each parameter of an operation a value beyond it, and the bound."""
    for parameter in list_parameters(operation.parameters):
        if parameter.least is not None:
            yield parameter, parameter.least - 1, parameter.least
        if parameter.most is not None:
            yield parameter, parameter.most + 1, parameter.most
        if parameter.longest is not None:
            yield parameter, "x" * (parameter.longest + 1), parameter.longest
        if parameter.shortest and parameter.required:
            yield parameter, "", parameter.shortest


BOUNDED = [operation for operation in OPERATIONS.values() if list(list_wrong_values(operation))]
of_each_operation = pytest.mark.parametrize("operation", BOUNDED, ids=lambda operation: operation.name)


WITHOUT_BOUND = {("dlq:read", "limit")}
"""Flags that a command has in place of the parameter, without its bound: `dlq read` reads page after page."""


def get_option(operation: Operation, parameter: Parameter) -> click.Parameter:
    """Return the flag or argument of a command; where that is written by hand, what follows from the operation."""
    command, made = COMMANDS.get(operation.name.replace(":", " ")), make_command(operation, CommandView())
    is_made = command is not None and getattr(command.callback, "__module__", "") == make_command.__module__
    if (operation.name, parameter.name) in WITHOUT_BOUND:
        is_made = False
    options: list[click.Parameter] = [*(command.params if command and is_made else ()), *made.params]
    return next(option for option in options if option.name == parameter.name)


def test_numbers_spans_and_texts_have_bounds() -> None:
    wrong = [case for operation in BOUNDED for case in list_wrong_values(operation)]
    kinds = {(bounded.widget, value == "") for bounded, value, _ in wrong}
    assert kinds >= {
        ("number", False),
        ("duration", False),
        ("text", False),
        ("lines", False),
        ("text", True),
    }


@of_each_operation
def test_a_flag_refuses_what_is_beyond_the_bound_of_its_parameter(operation: Operation) -> None:
    for parameter, value, bound in list_wrong_values(operation):
        option = get_option(operation, parameter)
        given = (str(value),) if option.multiple or option.nargs == -1 else str(value)
        with pytest.raises(click.BadParameter) as refused:
            option.process_value(click.Context(click.Command("test")), given)
        shown = format_shortest(bound) if parameter.widget == "duration" else f"{bound:g}"
        assert shown in refused.value.message
        assert "\n" not in refused.value.message


@of_each_operation
@pytest.mark.parametrize("is_text", [True, False], ids=["form", "api"])
def test_a_form_and_the_api_refuse_what_is_beyond_the_bound_of_a_parameter(
    operation: Operation, is_text: bool
) -> None:
    values = {
        field.name: make_value(field, is_text=is_text) for field in list_parameters(operation.parameters)
    }
    required = {name: content for name, content in values.items() if content is not None}
    for parameter, value, bound in list_wrong_values(operation):
        given = str(value) if is_text else value
        wrong = {parameter.name: [given] if parameter.widget == "lines" else given}
        with pytest.raises(Misconfigured) as refused:
            operation.parse({**required, **wrong}, is_text=is_text)
        assert parameter.name in str(refused.value)
        shown = format_shortest(bound) if parameter.widget == "duration" else str(bound)
        assert value == "" or shown in str(refused.value)


def make_value(parameter: Parameter, *, is_text: bool) -> Any:
    """Return a value for a parameter that is required; None for another one."""
    if not parameter.required:
        return None
    match parameter.widget:
        case "number" | "duration":
            least = parameter.kind(parameter.least or 0)
            return str(least) if is_text else least
        case "select":
            return parameter.choices[0]
        case "lines":
            return ["x"]
        case "json":
            return {}
        case _:
            return "x"
