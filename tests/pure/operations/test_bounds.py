"""The bounds of parameters: each surface refuses what is beyond one, in one line that says the bound."""

from collections.abc import Iterator
from typing import Any

import click
import pytest

from celery5.cli.main import cli
from celery5.cli.terminal.flags import format_shortest
from celery5.cli.terminal.operation_commands import CommandView, make_command
from celery5.errors import Misconfigured
from celery5.operations.operation import Operation
from celery5.operations.parameters import Parameter, list_parameters
from celery5.operations.table import OPERATIONS
from tests.house.commands_table import list_commands

COMMANDS = dict(list_commands(cli))


def list_wrong_values(operation: Operation) -> Iterator[tuple[Parameter, Any, float]]:
    """Yield for each bound of each parameter of an operation a value beyond it, and the bound."""
    for one in list_parameters(operation.parameters):
        if one.least is not None:
            yield one, one.least - 1, one.least
        if one.most is not None:
            yield one, one.most + 1, one.most
        if one.longest is not None:
            yield one, "x" * (one.longest + 1), one.longest
        if one.shortest and one.required:
            yield one, "", one.shortest


BOUNDED = [operation for operation in OPERATIONS.values() if list(list_wrong_values(operation))]
of_each_operation = pytest.mark.parametrize("operation", BOUNDED, ids=lambda one: one.name)


def get_option(operation: Operation, parameter: Parameter) -> click.Parameter:
    """Return the flag or argument of a command; where that is written by hand, what follows from the operation."""
    command, made = COMMANDS.get(operation.name.replace(":", " ")), make_command(operation, CommandView())
    is_made = command is not None and getattr(command.callback, "__module__", "") == make_command.__module__
    options: list[click.Parameter] = [*(command.params if command and is_made else ()), *made.params]
    return next(one for one in options if one.name == parameter.name)


def test_numbers_spans_and_texts_have_bounds() -> None:
    wrong = [one for operation in BOUNDED for one in list_wrong_values(operation)]
    kinds = {(one.widget, value == "") for one, value, _ in wrong}
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
    values = {one.name: make_value(one, is_text=is_text) for one in list_parameters(operation.parameters)}
    required = {name: one for name, one in values.items() if one is not None}
    for parameter, value, bound in list_wrong_values(operation):
        given = str(value) if is_text else value
        wrong = {parameter.name: [given] if parameter.widget == "lines" else given}
        with pytest.raises(Misconfigured) as refused:
            operation.parse({**required, **wrong}, is_text=is_text)
        assert parameter.name in str(refused.value)
        assert value == "" or str(bound) in str(refused.value)


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
