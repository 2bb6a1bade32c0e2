"""The flags that commands have from the parameters of operations."""

from importlib import import_module

import click
import pytest

from celery5.cli.terminal.operation_commands import CommandView, make_command
from celery5.operations.table import OPERATIONS

NOUNS = ("alert", "audit", "autoscale", "bulk", "dlq", "queue", "schedule", "task")


def list_commands() -> list[click.Command]:
    groups: list[click.Group] = [
        getattr(import_module(f"celery5.cli.commands.{noun}"), noun) for noun in NOUNS
    ]
    return [command for group in groups for command in group.commands.values()]


def show_help(command: click.Command) -> str:
    return command.get_help(click.Context(command, info_name=command.name))


@pytest.mark.parametrize(
    ("noun", "verb", "shown"),
    [
        ("alert", "history", "[default: 50; 1<=x<=500]"),
        ("alert", "silence", "[default: 1h; 1<=x<=90d]"),
        ("schedule", "add", "[default: once]"),
        ("dlq", "count", "[default: cause]"),  # that of the command: the operation's is another one
    ],
)
def test_help_shows_a_default_as_it_is_given(noun: str, verb: str, shown: str) -> None:
    group: click.Group = getattr(import_module(f"celery5.cli.commands.{noun}"), noun)
    assert shown in " ".join(show_help(group.commands[verb]).split())


def test_defaults_of_flags_are_values_that_their_types_take() -> None:
    options = [
        param for command in list_commands() for param in command.params if isinstance(param, click.Option)
    ]
    with_default = [parameter for parameter in options if parameter.show_default is True]
    assert with_default
    for option in with_default:
        option.type.convert(option.default, option, None)


@pytest.mark.parametrize(
    ("name", "words", "missing"), [("stream:seek", ["a", "b"], "to"), ("worker:run", ["a"], "to")]
)
def test_a_flag_that_is_required_is_missed(name: str, words: list[str], missing: str) -> None:
    with pytest.raises(click.MissingParameter) as refused:
        make_command(OPERATIONS[name], CommandView()).make_context("test", words)
    assert refused.value.param is not None
    assert refused.value.param.name == missing


def test_a_flag_for_several_values_says_so() -> None:
    text = " ".join(show_help(make_command(OPERATIONS["worker:ping"], CommandView())).split())
    assert "Workers, by name; default: all that live. May be given several times." in text


def test_no_view_turns_off_the_question_of_a_command_that_destroys() -> None:
    made = make_command(OPERATIONS["queue:purge"], CommandView(asks=False))
    assert "--yes" in [flag for parameter in made.params for flag in parameter.opts]
