"""Control commands: the guide and the CLI have exactly those that are defined, with the same names and help."""

from pathlib import Path
from typing import Any

import click
import pytest

from celery5.cli.commands.queue import queue
from celery5.cli.commands.worker import worker
from celery5.commands.declaration import RESERVED_COMMANDS
from celery5.errors import CommandRefused
from celery5.protocol.cluster.members import MAX_GROUP_MEMBERS
from celery5.protocol.commands.definitions import (
    BUDGET,
    CHECK_EXPIRED,
    COMMAND_DEFINITIONS,
    CONCURRENCY,
    LOG_AGAIN,
    PAUSE_QUEUE,
    PING,
    PREFER,
    PREFETCH,
    RESTART,
    REVOKE,
    SCALE,
    SET_LOG_LEVEL,
    SHUTDOWN,
    WORKERS,
    BudgetParameters,
    CommandDefinition,
    NoParameters,
    PrefetchParameters,
    QueueParameters,
    list_commands,
)

GROUPS = {"worker": worker, "queue": queue}
GUIDE = Path(__file__).parents[3] / "docs/guide/control.md"


def row(definition: CommandDefinition[Any]) -> str:
    parameters = ", ".join(
        f"`{name}`{'' if is_required else '?'}" for name, is_required in definition.required_by_name.items()
    )
    usage = definition.cli_usage or f"worker tell {definition.name}"
    return f"| `{definition.name}` | {parameters} | `{usage}` | {definition.help} |"


def test_the_guide_lists_each_command_of_a_worker_as_it_is_defined() -> None:
    rows = [
        row(definition)
        for definition in COMMAND_DEFINITIONS.values()
        if definition.recipients >= WORKERS and definition.permission != "internal"
    ]
    table = GUIDE.read_text().partition("| command | parameters |")[2].partition("\n\n")[0].splitlines()[2:]
    assert table == rows


def test_the_cli_has_the_commands_with_their_names_and_help() -> None:
    usages = {
        tuple(candidate.cli_usage.split()[:2]): candidate
        for candidate in COMMAND_DEFINITIONS.values()
        if candidate.cli_usage
    }
    assert worker.commands.keys() == {name for group, name in usages if group == "worker"} | {"tell", "list"}
    for (group, name), definition in usages.items():
        assert (GROUPS[group].commands[name].help or "").startswith(definition.help)


def test_the_arguments_and_flags_of_the_cli_are_the_parameters_that_are_defined() -> None:
    of_every_command = {"--to", "--timeout", "--json"}
    for definition in COMMAND_DEFINITIONS.values():
        if not definition.cli_usage:
            continue
        group, name, *usage = definition.cli_usage.split()
        parameters = GROUPS[group].commands[name].params
        arguments = [parameter for parameter in parameters if isinstance(parameter, click.Argument)]
        flags = {parameter.opts[0] for parameter in parameters if isinstance(parameter, click.Option)}
        written = [word for word in usage if word.strip("[]").isupper()]
        for argument in arguments:
            word = argument.metavar or (argument.name or "").upper()
            assert (word if argument.required else f"[{word}]") in written
            if name == definition.name:
                assert definition.required_by_name[word.lower()] is argument.required
        written_flags = {word.strip("[]") for word in usage if "--" in word}
        # `--kwargs` is left out of a usage that has to fit in a line of a table.
        assert written_flags - of_every_command == flags - of_every_command - {"--kwargs"}


def test_an_application_may_not_take_the_name_of_a_command_of_workers() -> None:
    assert list_commands("worker") == RESERVED_COMMANDS


def test_parameters_are_typed_values_and_those_left_out_have_their_defaults() -> None:
    assert PAUSE_QUEUE.parse({"queue": "default", "here": True}) == QueueParameters("default", here=True)
    assert PAUSE_QUEUE.parse({"queue": "default"}).here is False
    assert PING.parse({}) == NoParameters()
    assert SHUTDOWN.parse({}).how == "warm"
    assert PREFETCH.parse({"factor": 2}) == PrefetchParameters(2.0, None)
    assert (SCALE.parse({"workers": 2, "of": 3}).target, SCALE.parse({"workers": 0}).target) == (3, 0)
    assert BUDGET.parse({"kind": "trio", "minimum": None}) == BudgetParameters("trio")


@pytest.mark.parametrize(
    ("definition", "parameters", "why"),
    [
        (PAUSE_QUEUE, {"que": "default"}, "pause-queue does not take 'que': it takes queue and here"),
        (PREFER, {"task": {}}, "prefer does not take 'task': it takes tasks, queues and seconds"),
        (REVOKE, {"key": "a"}, "revoke does not take 'key': it takes id"),
        (PING, {"x": 1}, "ping does not take 'x': it takes no parameters"),
        (PAUSE_QUEUE, {"queue": "a", "here": "x"}, "pause-queue: here is 'x': give true or false"),
        (REVOKE, {}, "revoke: id is None: give a text"),
        (REVOKE, {"id": ""}, "revoke: id is '': give a text"),
        (
            SHUTDOWN,
            {"how": "now"},
            "shutdown: how is 'now': give warm (what runs may finish) or cold (it is given back now)",
        ),
        (
            SET_LOG_LEVEL,
            {"level": "loud"},
            "set-log-level: level is 'loud': give one of debug, info, warning, error",
        ),
        (
            BUDGET,
            {"kind": "trio", "minimum": -1},
            "budget: minimum is -1: give a whole number, 0 or more",
        ),
        (BUDGET, {"maximum": True}, "budget: maximum is True: give a whole number, 1 or more"),
        (PREFETCH, {"factor": 17}, "prefetch: factor is 17: give a number from 1 to 16"),
        (CONCURRENCY, {"factor": 0.5}, "concurrency: factor is 0.5: give a number from 1 to 16"),
        (PREFETCH, {"seconds": -1}, "prefetch: seconds is -1: give a number from 0.01 to 3600"),
        (CHECK_EXPIRED, {"checks": "a"}, "check-expired: checks is 'a': give a list of names"),
        (RESTART, {"members": []}, "restart: members is []: give a list of their names"),
        (SCALE, {"workers": -1}, f"scale: workers is -1: give a number from 0 to {MAX_GROUP_MEMBERS}"),
        (SCALE, {}, f"scale: workers is None: give a number from 0 to {MAX_GROUP_MEMBERS}"),
        (LOG_AGAIN, {"messages": 500 * "x"}, f"messages is '{199 * 'x'}: give a list of log messages"),
    ],
)
def test_a_parameter_that_is_unknown_missing_or_wrong_is_refused_in_one_line(
    definition: CommandDefinition[Any], parameters: dict[str, object], why: str
) -> None:
    with pytest.raises(CommandRefused) as refused:
        definition.parse(parameters)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


def test_each_parameter_says_what_it_takes() -> None:
    for definition in COMMAND_DEFINITIONS.values():
        for name in definition.required_by_name:
            required = {
                other: "x" for other, is_required in definition.required_by_name.items() if is_required
            }
            with pytest.raises(CommandRefused, match=f"{name} is <object.*: give "):
                definition.parse({**required, name: object()})


def test_a_command_that_only_reads_is_safe_to_repeat_unless_its_name_is_free() -> None:
    for definition in COMMAND_DEFINITIONS.values():
        assert definition.is_idempotent or definition.permission != "read" or not definition.is_reserved
