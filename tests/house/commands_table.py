"""The table of the commands that are operations, made from the operations and from their commands.

`python -m tests.house.commands_table` writes it to the page of the guide.
"""

from collections.abc import Iterator, Mapping

import click

from celery5.cli.main import cli
from celery5.operations.operation import Operation
from celery5.operations.table import OPERATIONS
from tests.house.sources import HERE

PAGE = HERE / "docs" / "guide" / "cli.md"
START, END = "<!-- commands:start -->\n", "\n<!-- commands:end -->"
ELSEWHERE: Mapping[str, str] = {
    # A page of its own that shows more than the operation: see the command's module.
    "info:show": "info",
    "top:show": "top",
    "doctor:run": "doctor",
    # Dead letters with --stream and --group: not one operation, since results, conditions, roles and danger differ.
    "dlq:read-records": "dlq read",
    "dlq:replay-records": "dlq replay",
    "dlq:purge-records": "dlq purge",
}
"""Operations without a command of their own, and the command that does the same."""
GUIDES: Mapping[str, str] = {
    "alert": "alerts.md",
    "audit": "audit.md",
    "autoscale": "autoscaling.md",
    "bulk": "bulk-actions.md",
    "config": "configuration.md#show-and-check-settings",
    "controller": "controller.md",
    "dlq": "dead-letters.md",
    "event": "events.md",
    "metrics": "metrics.md",
    "queue": "metrics.md#storage",
    "schedule": "periodic.md#while-all-runs",
    "stream": "streams-operating.md",
    "task": "finding-jobs.md",
    "worker": "control.md",
    "workflow": "workflows.md#on-the-command-line",
}
"""The page of the guide for each noun."""
COMMON_FLAGS = {"--json", "--yes", "--timeout"}
"""Flags that many commands have, and what the page says of them stands above the table."""


def list_commands(group: click.Group, *path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield the commands of a group and of those in it, with their whole names."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from list_commands(command, *path, name)
        elif command is not None:
            yield " ".join((*path, name)), command


def make_table() -> str:
    """Return the whole table."""
    commands = dict(list_commands(cli))
    rows = [
        _make_row(operation, commands[operation.name.replace(":", " ")])
        for operation in sorted(OPERATIONS.values(), key=lambda operation: operation.noun)
        if operation.name not in ELSEWHERE
    ]
    return "\n".join(["| command | does | flags | role |", "|---|---|---|---|", *rows])


def _make_row(operation: Operation, command: click.Command) -> str:
    arguments = [_format_argument(param) for param in command.params if isinstance(param, click.Argument)]
    usage = f"`{' '.join((operation.noun, operation.verb, *arguments))}`"
    name = f"[{usage}]({GUIDES[operation.noun]})" if operation.noun in GUIDES else usage
    flags = [
        f"`{param.opts[0]}`"
        for param in command.params
        if isinstance(param, click.Option) and param.opts[0] not in COMMON_FLAGS
    ]
    summary = operation.summary.replace("|", "\\|")
    return f"| {name} | {summary} | {', '.join(flags)} | {operation.role} |"


def _format_argument(argument: click.Argument) -> str:
    name = (
        (argument.metavar or (argument.name or "").upper())
        .strip("[].")
        .replace("]...", "")
        .replace("|", "\\|")
    )
    if argument.nargs == -1:
        name += "..."
    return name if argument.required else f"[{name}]"


if __name__ == "__main__":
    text = PAGE.read_text()
    before, _, rest = text.partition(START)
    PAGE.write_text(before + START + make_table() + END + rest.partition(END)[2])
