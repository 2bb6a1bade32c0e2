"""Select dead jobs by the flags of a command, and warn of names in filters that the application's code does not have.

Such a name may be misspelt. It may also have been removed from the code while jobs of it are kept, so this is no error.
"""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from celery5.cli.terminal.flags import queue_names
from celery5.cli.terminal.operation_commands import make_flag
from celery5.cli.terminal.output import echo, format_cell
from celery5.operations.dead_letters import DeadFilter
from celery5.operations.parameters import list_parameters
from celery5.protocol.events.sinks import get_sink_names
from celery5.protocol.job.dead_letters import CONDITION_WORDS, DeadJobFilter
from celery5.similar_names import did_you_mean

if TYPE_CHECKING:
    from celery5.app import App

F = TypeVar("F", bound=Callable[..., Any])


def warn_of_unknown_tasks(app: "App", names: Collection[str]) -> None:
    """Warn of each name that is no task's, but for patterns such as `shop.*`. Not without the code."""
    for name in names if app.tasks else ():
        if name not in app.tasks and not set(name) & set("*?["):
            hint = did_you_mean(name, app.tasks, otherwise="celery5 task search shows jobs of all tasks")
            echo(f"Warning: no task here is named {format_cell(name)}; {hint}", err=True)


def warn_of_unknown_sinks(app: "App", names: Collection[str]) -> None:
    """Warn if no task has a sink of a name. Not without the code."""
    sinks = get_sink_names(app.tasks.values())
    unknown = [name for name in names if name not in sinks]
    if unknown and app.tasks:
        hint = f"the sinks are {', '.join(map(format_cell, sinks))}" if sinks else "no task has a sink"
        echo(f"Warning: no sink is named {', '.join(map(format_cell, unknown))}; {hint}", err=True)


def selection_flags(command: F) -> F:
    """Add the flags that select dead jobs: those of the operations on them."""
    for parameter in reversed(list_parameters(DeadFilter)):
        command = cast("F", make_flag(parameter)(command))
    return command


def parse_selection(flags: Mapping[str, Any]) -> DeadJobFilter:
    """Return the filter that the flags select. Raises Misconfigured for a name that no queue can have."""
    conditions: dict[str, Any] = {name: flags[name] or None for name in CONDITION_WORDS}
    conditions |= {name: flags[name] for name in ("older_than", "newer_than", "message")}
    return {
        **cast("DeadJobFilter", conditions),
        "queue": selected_queues(flags) or None,
        "limit": flags.get("limit"),
        "newest_first": flags.get("newest_first") or None,
        "after": flags.get("after"),
    }


def selected_queues(flags: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the queues that the flags select, each maybe a list with commas; none for all."""
    return queue_names(",".join(flags["queue"]) if flags["queue"] else None)


def is_narrowed(choice: DeadJobFilter) -> bool:
    """Return whether a filter selects less than all dead jobs of its queues."""
    return any(value is not None for name, value in choice.items() if name != "queue")
