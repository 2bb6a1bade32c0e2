"""Operations: each is on every surface, and each parameter says what it is."""

import click
import pytest

from celery5.cli.main import cli
from celery5.operations.operation import Operation
from celery5.operations.parameters import list_parameters
from celery5.operations.table import OPERATIONS
from tests.house.commands_table import ELSEWHERE, END, PAGE, START, list_commands, make_table

COMMANDS = dict(list_commands(cli))


def test_each_operation_has_a_command_of_its_name() -> None:
    commands = {name: ELSEWHERE.get(name, name.replace(":", " ")) for name in OPERATIONS}
    assert {name: command for name, command in commands.items() if command not in COMMANDS} == {}


def test_the_guide_has_the_table_of_commands_that_operations_make() -> None:
    table = PAGE.read_text().partition(START)[2].partition(END)[0]
    assert table == make_table(), "write it again: python -m tests.house.commands_table"


def test_no_exception_has_become_a_command() -> None:
    assert [name for name in ELSEWHERE if name.replace(":", " ") in COMMANDS] == []
    assert ELSEWHERE.keys() - OPERATIONS.keys() == set()


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda operation: operation.name)
def test_each_parameter_says_what_it_is_in_forms_help_and_openapi(operation: Operation) -> None:
    assert [parameter.name for parameter in list_parameters(operation.parameters) if not parameter.help] == []
    assert operation.summary.endswith(".")


def test_what_a_command_takes_as_id_is_called_so_in_every_table() -> None:
    columns = [(name, column) for name, operation in OPERATIONS.items() for column in operation.columns]
    assert [
        (name, column.name) for name, column in columns if column.of == "id" and column.name != "id"
    ] == []


def test_what_bounds_the_number_of_rows_is_called_limit_on_all_surfaces() -> None:
    """One name for commands, forms and the JSON API: whoever has learned it of one can use it of all."""
    other_names = {"count", "most", "number", "last", "top", "rows", "size"}
    fields = [
        (name, parameter.name, parameter.help)
        for name, operation in OPERATIONS.items()
        for parameter in list_parameters(operation.parameters)
        if parameter.kind is int
    ]
    flags = [
        (name, "/".join(option.opts).replace("--", ""), option.help or "")
        for name, command in COMMANDS.items()
        for option in command.params
        if isinstance(option, click.Option) and isinstance(option.type, click.types.IntParamType)
    ]
    bounds = [
        (surface, name)
        for surface, name, help_text in (*fields, *flags)
        if ("at most" in help_text and not help_text.startswith("Slots")) or name in other_names
    ]
    assert len(bounds) >= 18
    assert [(surface, name) for surface, name in bounds if name != "limit"] == []


def test_each_process_has_the_flags_of_the_log_from_one_definition() -> None:
    starts = {name: command for name, command in COMMANDS.items() if name.endswith(" start")}
    flags = {
        name: [
            (option.name, option.help, getattr(option.type, "choices", None))
            for option in command.params
            if isinstance(option, click.Option) and (option.name or "").startswith("log_")
        ]
        for name, command in starts.items()
    }
    assert {"controller start", "dashboard start", "publisher start", "worker start"} <= starts.keys()
    assert [option[0] for option in flags["worker start"]] == ["log_format", "log_level"]
    assert {name for name, options in flags.items() if options != flags["worker start"]} == set()
