"""Control: the commands that tell workers what to do, and show what each of them answers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from celery5.cli.terminal.flags import Duration
from celery5.cli.terminal.output import clean_lines, echo, format_cell, format_duration, format_table, to_json
from celery5.cli.terminal.partial import skip_unreachable
from celery5.cli.terminal.target import Target
from celery5.errors import CeleryError
from celery5.protocol.commands.definitions import (
    ACTIVE,
    BUDGET,
    PAUSE_QUEUE,
    PING,
    RELOAD,
    RESUME_QUEUE,
    RETRY_BOOT_STEP,
    REVOKE,
    SET_LOG_LEVEL,
    SHUTDOWN,
    STATS,
    CommandDefinition,
)
from celery5.protocol.process.recycling import format_mib
from celery5.protocol.scaling.budget import KINDS
from celery5.protocol.text_values import parse_json, parse_parameter

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.commands.control import Reply

Row = dict[str, object]


def active_table(worker: str, answer: Any) -> Iterator[Row]:
    """Yield a row for each running job."""
    for job in _mappings(answer):
        yield {
            "worker": worker,
            "job": job.get("id", ""),
            "task": job.get("task", ""),
            "arguments": job.get("arguments", ""),
            "queue": job.get("queue", ""),
            "attempt": job.get("attempt", ""),
            "for": _span(job.get("seconds")),
        }


def stats_table(worker: str, answer: Any) -> Iterator[Row]:
    """Yield one row."""
    numbers = _mapping(answer)
    memory, process = numbers.get("memory"), _mapping(numbers.get("process"))
    yield {
        "worker": worker,
        "kind": numbers.get("kind", ""),
        "pid": process.get("pid", ""),
        "up": _span(numbers.get("uptime")),
        "jobs": ", ".join(f"{many} {state}" for state, many in _mapping(numbers.get("jobs")).items()),
        "running": numbers.get("running", ""),
        "slots": ", ".join(_slots(_mapping(numbers.get("slots")))),
        "queues": ", ".join(_queues(_mapping(numbers.get("queues")))),
        "memory": format_mib(memory) if isinstance(memory, int) else "",
        "loop lag": _span(numbers.get("loop_lag")),
    }


def health_table(worker: str, answer: Any) -> Iterator[Row]:
    """Yield a row for each check and each circuit breaker."""
    found = _mapping(answer)
    for check in _mappings(found.get("checks")):
        stale = " (stale)" if check.get("is_stale") else ""
        state = f"{check.get('state', '')}{stale}"
        yield {
            "worker": worker,
            "what": "check",
            "name": check.get("check", ""),
            "state": state,
            **_why(check),
        }
    for breaker in _mappings(found.get("breakers")):
        watches = " (only watches)" if breaker.get("mode") == "watch" else ""
        state = f"{breaker.get('state', '')}{watches}"
        yield {
            "worker": worker,
            "what": "breaker",
            "name": breaker.get("of", ""),
            "state": state,
            **_why(breaker),
        }


TABLES: Mapping[str, tuple[Callable[[str, Any], Iterator[Row]], str]] = {
    "active": (active_table, "no job runs"),
    "stats": (stats_table, "nobody has answered"),
    "health": (health_table, "no checks, and no circuit breaker has seen a failure"),
}
"""By the name of the command: the function that makes rows of one worker's answer, and the text when there are none."""


def format_answers(command: str, answers: Iterable[tuple[str, Any]]) -> str:
    """Return one table of what workers have answered to a command of TABLES, each with its name."""
    rows_of, nothing = TABLES[command]
    return format_table([row for worker, answer in answers for row in rows_of(worker, answer)], empty=nothing)


def _why(found: Mapping[str, Any]) -> Row:
    return {"why": found.get("why", "")}


def _slots(slots: Mapping[str, Any]) -> Iterator[str]:
    """Yield how many slots of each kind are taken, and how many there are; kinds without slots are left out."""
    for kind, each in slots.items():
        numbers = _mapping(each)
        if numbers.get("current"):
            yield f"{kind} {numbers.get('executing', 0)}/{numbers['current']}"


def _queues(queues: Mapping[str, Any]) -> Iterator[str]:
    for name, state in queues.items():
        yield name if state == "read" else f"{name} ({state})"


def _span(seconds: object) -> str:
    return format_duration(seconds) if isinstance(seconds, int | float) else ""


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [_mapping(each) for each in cast("list[object]", value)] if isinstance(value, list) else []


F = TypeVar("F", bound=Callable[..., Any])
NO_WORKER = "no worker of this application lives; celery5 worker start begins one"


class CommandNotDone(CeleryError):
    """A worker did not do what it was told, or none is there to do it."""


def reply_flags(command: F) -> F:
    """Add the flags of all commands that are sent to inboxes and answered."""
    for flag in (
        click.option("--json", "wants_json", is_flag=True, help="For programs."),
        click.option(
            "--timeout",
            type=Duration(0.01, 3600),
            default=5.0,
            show_default=True,
            metavar="SECONDS",
            help="How long answers are waited for.",
        ),
    ):
        command = flag(command)
    return command


def worker_command_flags(command: F) -> F:
    """Add the flags that all commands to workers share."""
    to = click.option(
        "--to",
        multiple=True,
        metavar="NAME",
        help="A worker; may be given several times. Default: all that live.",
    )
    return to(reply_flags(command))


def _command(definition: CommandDefinition) -> Callable[[Callable[..., Any]], click.Command]:
    """Return the decorator for the command of this definition, with its name and its help."""
    return click.command(definition.name, help=definition.help)


@_command(PING)
@worker_command_flags
@click.pass_obj
def ping(target: Target, /, **said: Any) -> None:
    _tell(target.load(), PING.name, {}, **said)


@_command(STATS)
@worker_command_flags
@click.pass_obj
def stats(target: Target, /, **said: Any) -> None:
    _tell(target.load(), STATS.name, {}, **said)


@_command(ACTIVE)
@worker_command_flags
@click.pass_obj
def active(target: Target, /, **said: Any) -> None:
    _tell(target.load(), ACTIVE.name, {}, **said)


@_command(PAUSE_QUEUE)
@click.argument("queue")
@worker_command_flags
@click.pass_obj
def pause_queue(target: Target, /, queue: str, **said: Any) -> None:
    _have_read(target, PAUSE_QUEUE.name, queue, **said)


@_command(RESUME_QUEUE)
@click.argument("queue")
@worker_command_flags
@click.pass_obj
def resume_queue(target: Target, /, queue: str, **said: Any) -> None:
    _have_read(target, RESUME_QUEUE.name, queue, **said)


@_command(REVOKE)
@click.argument("job_id", metavar="ID")
@worker_command_flags
@click.pass_obj
def revoke(target: Target, /, job_id: str, **said: Any) -> None:
    _tell(target.load(), REVOKE.name, {"id": job_id}, one_is_enough=True, **said)


@_command(SHUTDOWN)
@click.option("--cold", is_flag=True, help="Give back what runs now, rather than wait for it to end.")
@worker_command_flags
@click.pass_obj
def shutdown(target: Target, /, *, cold: bool, **said: Any) -> None:
    _tell(target.load(), SHUTDOWN.name, {"how": "cold" if cold else "warm"}, **said)


@_command(RELOAD)
@worker_command_flags
@click.pass_obj
def reload(target: Target, /, **said: Any) -> None:
    _tell(target.load(), RELOAD.name, {}, **said)


@_command(RETRY_BOOT_STEP)
@click.argument("step")
@worker_command_flags
@click.pass_obj
def retry_boot_step(target: Target, /, step: str, **said: Any) -> None:
    _tell(target.load(), RETRY_BOOT_STEP.name, {"step": step}, **said)


@_command(SET_LOG_LEVEL)
@click.argument("level", type=click.Choice(["debug", "info", "warning", "error"]))
@worker_command_flags
@click.pass_obj
def set_log_level(target: Target, /, level: str, **said: Any) -> None:
    _tell(target.load(), SET_LOG_LEVEL.name, {"level": level}, **said)


@_command(BUDGET)
@click.argument("kind", type=click.Choice(KINDS), required=False)
@click.option("--minimum", type=int, metavar="N", help="Slots that there always are.")
@click.option("--maximum", type=int, metavar="N", help="Slots that there are at most.")
@worker_command_flags
@click.pass_obj
def budget(
    target: Target, /, kind: str | None, *, minimum: int | None, maximum: int | None, **said: Any
) -> None:
    if kind is None and (minimum, maximum) != (None, None):
        raise click.UsageError(f"say of which kind: {', '.join(KINDS)}")
    wanted = {"kind": kind, "minimum": minimum, "maximum": maximum}
    _tell(
        target.load(), BUDGET.name, {name: each for name, each in wanted.items() if each is not None}, **said
    )


@click.command()
@click.argument("task")
@click.option("--args", "arguments", default="[]", metavar="JSON", help="Its arguments: '[2, 3]'.")
@click.option("--kwargs", "named", default="{}", metavar="JSON", help="Its named arguments: '{\"n\": 2}'.")
@click.option("--to", required=True, metavar="NAME", help="The worker.")
@click.option(
    "--timeout",
    type=Duration(0.01, 60),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How long its answer is waited for.",
)
@click.pass_obj
def run(target: Target, /, task: str, *, arguments: str, named: str, to: str, timeout: float) -> None:
    """Run a job of TASK on one worker, now. Prints the job's id."""
    app = target.load(needs_code=True)
    args, kwargs = parse_json(arguments, list, "--args"), parse_json(named, dict, "--kwargs")
    echo(app.control.run(app.signature(task, *args, **kwargs), to=to, timeout=timeout).id)


@click.command()
@click.argument("command")
@click.argument("parameters", nargs=-1, metavar="[NAME=JSON]...")
@worker_command_flags
@click.pass_obj
def tell(target: Target, /, command: str, parameters: tuple[str, ...], **said: Any) -> None:
    """Send any COMMAND: `health`."""
    _tell(target.load(), command, dict(map(parse_parameter, parameters)), **said)


COMMANDS: tuple[click.Command, ...] = (
    *(ping, stats, active, pause_queue, resume_queue, revoke, shutdown, reload, retry_boot_step),
    *(set_log_level, budget, run, tell),
)
"""The commands to workers."""


def _have_read(target: Target, command: str, queue: str, *, to: tuple[str, ...], **said: Any) -> None:
    """Have workers read a queue, or not. While none lives, those that start later do."""
    app = target.load()
    if to:
        _tell(app, command, {"queue": queue, "here": True}, to=to, **said)
        return
    with skip_unreachable(app, wants_json=said["wants_json"], queues=[queue]) as reached:
        app.control.workers()
        for (
            error
        ) in reached.relevant_errors.values():  # the pause is written to the broker that has the queue
            raise error
        replies = app.control.send(command, {"queue": queue}, timeout=said["timeout"])
        if replies:
            _say(replies, command, wants_json=said["wants_json"], one_is_enough=False)
            return
    if said["wants_json"]:
        echo(to_json([]))
    state = "paused" if command == PAUSE_QUEUE.name else "resumed"
    text = f"no worker of this application lives; those that begin later find {queue} {state}"
    echo(format_cell(text), err=said["wants_json"])


def _tell(
    app: "App",
    command: str,
    parameters: Mapping[str, Any],
    *,
    to: tuple[str, ...],
    timeout: float,
    wants_json: bool,
    one_is_enough: bool = False,
    queues: Sequence[str] = (),
) -> None:
    with skip_unreachable(app, wants_json=wants_json, queues=queues) if not to else nullcontext():
        replies = app.control.send(command, parameters, to=to or None, timeout=timeout)
        _say(replies, command, wants_json=wants_json, one_is_enough=one_is_enough)


def _say(replies: "list[Reply]", command: str, *, wants_json: bool, one_is_enough: bool) -> None:
    """Show what each has answered. Raises NotDone."""
    left = [each for each in replies if not each.ok]
    if len(replies) == len(left) == 1 and not wants_json:
        raise CommandNotDone(f"{left[0].worker} did not do it ({left[0].reason}): {left[0].why}")
    if replies or wants_json:
        echo(to_json(replies) if wants_json else _for_people(replies, command))
    if not replies:
        raise CommandNotDone(NO_WORKER)
    if left and not (one_is_enough and len(left) < len(replies)):
        raise CommandNotDone(f"{len(left)} of {len(replies)} did not do it")


def _for_people(replies: "list[Reply]", command: str) -> str:
    """A table where the command has one, and below it those that did not answer."""
    if command not in TABLES:
        return _shown(replies)
    left = [each for each in replies if not each.ok]
    found = [(each.worker, each.answer) for each in replies if each.ok]
    parts = [format_answers(command, found)] if found else []
    return "\n\n".join([*parts, *([_shown(left)] if left else [])])


def _shown(replies: "list[Reply]") -> str:
    """A line for each worker: its name, whether it did it, and what it says."""
    width = max(len(format_cell(each.worker)) for each in replies)
    lines = [
        f"{format_cell(each.worker):{width}}  {'ok' if each.ok else format_cell(each.reason)}  "
        f"{clean_lines(to_json(each.answer)) if each.ok else format_cell(each.why)}"
        for each in replies
    ]
    return "\n".join(lines)
