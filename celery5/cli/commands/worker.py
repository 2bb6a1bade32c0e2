"""Start workers, list them, send them commands, and show what each of them answers."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from celery5.cli.terminal.errors import skip_unreachable
from celery5.cli.terminal.flags import Duration, broker_flag, configure, processes_flag, serving_flags
from celery5.cli.terminal.output import clean_lines, echo, format_cell, format_progress, format_table, to_json
from celery5.cli.terminal.target import Target
from celery5.commands.control import find_failures
from celery5.errors import CeleryError
from celery5.protocol.cluster.leadership import EPOCH_VARIABLE
from celery5.protocol.commands.definitions import (
    ACTIVE,
    BUDGET,
    PAUSE_QUEUE,
    PING,
    RELOAD,
    RESUME_QUEUE,
    RETRY_BOOT_STEP,
    REVOKE,
    RUN_TASK,
    SET_LOG_LEVEL,
    SHUTDOWN,
    STACK,
    STATS,
    CommandDefinition,
)
from celery5.protocol.durations import format_age, format_duration
from celery5.protocol.observability.overview import describe_loss
from celery5.protocol.process.recycling import format_mib
from celery5.protocol.scaling.budget import is_full_task_name
from celery5.protocol.task_kinds import TASK_KINDS
from celery5.protocol.text_values import parse_json_array, parse_json_object, parse_parameter
from celery5.similar_names import did_you_mean

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.commands.control import Reply
    from celery5.protocol.observability.overview import LostWorker, WorkerOverview

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
            "for": _format_seconds(job.get("seconds")),
            "progress": _format_progress(_mapping(job.get("progress"))),
        }


def _format_progress(report: Mapping[str, Any]) -> str:
    """Return what a job has reported; '' for nothing, or for what no worker sends."""
    done, total = report.get("done"), report.get("total")
    if not isinstance(done, int | float) or not isinstance(total, int | float | None):
        return ""
    return format_progress(done, total, str(report.get("note", "")))


def stats_table(worker: str, answer: Any) -> Iterator[Row]:
    """Yield one row."""
    numbers = _mapping(answer)
    memory, process = numbers.get("memory"), _mapping(numbers.get("process"))
    yield {
        "worker": worker,
        "kind": numbers.get("kind", ""),
        "pid": process.get("pid", ""),
        "up": _format_seconds(numbers.get("uptime")),
        "jobs": ", ".join(f"{count} {state}" for state, count in _mapping(numbers.get("jobs")).items()),
        "running": numbers.get("running", ""),
        "slots": ", ".join(_slots(_mapping(numbers.get("slots")))),
        "queues": ", ".join(_queues(_mapping(numbers.get("queues")))),
        "memory": format_mib(memory) if isinstance(memory, int) else "",
        "loop lag": _format_seconds(numbers.get("loop_lag")),
    }


def health_table(worker: str, answer: Any) -> Iterator[Row]:
    """Yield a row for each check and each circuit breaker."""
    report = _mapping(answer)
    for check in _mappings(report.get("checks")):
        stale = " (stale)" if check.get("is_stale") else ""
        yield {
            "worker": worker,
            "what": "check",
            "name": check.get("check", ""),
            "state": f"{check.get('state', '')}{stale}",
            "why": check.get("why", ""),
        }
    for breaker in _mappings(report.get("breakers")):
        watches = " (only watches)" if breaker.get("mode") == "watch" else ""
        yield {
            "worker": worker,
            "what": "breaker",
            "name": breaker.get("of", ""),
            "state": f"{breaker.get('state', '')}{watches}",
            "why": breaker.get("why", ""),
        }


TABLES: Mapping[str, tuple[Callable[[str, Any], Iterator[Row]], str]] = {
    "active": (active_table, "no job runs"),
    "stats": (stats_table, "nobody has answered"),
    "health": (health_table, "no checks, and no circuit breaker has seen a failure"),
}
"""For each command the function that makes rows of one worker's answer, and the text when there are none."""


def format_answers(command: str, answers: Iterable[tuple[str, Any]]) -> str:
    """Return one table of what workers have answered to a command of TABLES, each with its name."""
    make_rows, empty = TABLES[command]
    return format_table([row for worker, answer in answers for row in make_rows(worker, answer)], empty=empty)


def format_stacks(worker: str, answer: Any) -> str:
    """Return the stacks of a worker: each has a line that says whose it is, and below that its own lines."""
    reply = _mapping(answer)
    parts: list[str] = []
    for stack in _mappings(reply.get("stacks")):
        fields = [worker, *(str(stack.get(name) or "") for name in ("job", "task", "kind", "child"))]
        lines = ["  ".join(format_cell(field) for field in fields if field)]
        lines += [f"  {clean_lines(str(line))}" for line in _list(stack.get("lines"))]
        lines += [f"  ({format_cell(stack['note'])})"] if stack.get("note") else []
        parts.append("\n".join(lines))
    parts += [format_cell(f"{worker}: {reply['note']}")] if reply.get("note") else []
    return "\n\n".join(parts or [f"{format_cell(worker)}  no stacks"])


def _slots(slots: Mapping[str, Any]) -> Iterator[str]:
    """Yield how many slots of each kind are taken, and how many there are; kinds without slots are left out."""
    for kind, slot in slots.items():
        numbers = _mapping(slot)
        if numbers.get("current"):
            yield f"{kind} {numbers.get('executing', 0)}/{numbers['current']}"


def _queues(queues: Mapping[str, Any]) -> Iterator[str]:
    for name, state in queues.items():
        yield name if state == "read" else f"{name} ({state})"


def _format_seconds(seconds: object) -> str:
    return format_duration(seconds) if isinstance(seconds, int | float) else ""


def _list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [_mapping(item) for item in cast("list[object]", value)] if isinstance(value, list) else []


F = TypeVar("F", bound=Callable[..., Any])


@click.group(no_args_is_help=False)
def worker() -> None:
    """Start workers, and send them commands."""


NO_WORKER = "no worker of this application is running; celery5 worker start starts one"


class CommandNotDone(CeleryError):
    """A worker did not do what a command asks, or there is no worker to do it."""


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


def _command(definition: CommandDefinition[Any]) -> Callable[[Callable[..., Any]], click.Command]:
    """Return the decorator for the command of this definition, with its name and its help."""
    return worker.command(definition.name, help=definition.help)


def _add_command_without_parameters(definition: CommandDefinition[Any]) -> None:
    @_command(definition)
    @worker_command_flags
    @click.pass_obj
    def _(target: Target, /, **flags: Any) -> None:
        _send(target.load(), definition.name, {}, **flags)


for _definition in (PING, STATS, ACTIVE, RELOAD):
    _add_command_without_parameters(_definition)


@_command(PAUSE_QUEUE)
@click.argument("queue")
@worker_command_flags
@click.pass_obj
def pause_queue(target: Target, /, queue: str, **flags: Any) -> None:
    _send_queue_command(target, PAUSE_QUEUE.name, queue, **flags)


@_command(RESUME_QUEUE)
@click.argument("queue")
@worker_command_flags
@click.pass_obj
def resume_queue(target: Target, /, queue: str, **flags: Any) -> None:
    _send_queue_command(target, RESUME_QUEUE.name, queue, **flags)


@_command(REVOKE)
@click.argument("job_id", metavar="ID")
@worker_command_flags
@click.pass_obj
def revoke(target: Target, /, job_id: str, **flags: Any) -> None:
    _send(target.load(), REVOKE.name, {"id": job_id}, **flags)


@_command(STACK)
@click.option(
    "--job", metavar="ID", help="Of this job alone. Without --to, the worker that runs it is found."
)
@worker_command_flags
@click.pass_obj
def stack(target: Target, /, *, job: str | None, **flags: Any) -> None:
    parameters = {} if job is None else {"job": job}
    _send(target.load(), STACK.name, parameters, **flags)


@_command(SHUTDOWN)
@click.option("--cold", is_flag=True, help="Give back what runs now, rather than wait for it to end.")
@worker_command_flags
@click.pass_obj
def shutdown(target: Target, /, *, cold: bool, **flags: Any) -> None:
    _send(target.load(), SHUTDOWN.name, {"how": "cold" if cold else "warm"}, **flags)


@_command(RETRY_BOOT_STEP)
@click.argument("step")
@worker_command_flags
@click.pass_obj
def retry_boot_step(target: Target, /, step: str, **flags: Any) -> None:
    _send(target.load(), RETRY_BOOT_STEP.name, {"step": step}, **flags)


@_command(SET_LOG_LEVEL)
@click.argument("level", type=click.Choice(["debug", "info", "warning", "error"]))
@worker_command_flags
@click.pass_obj
def set_log_level(target: Target, /, level: str, **flags: Any) -> None:
    _send(target.load(), SET_LOG_LEVEL.name, {"level": level}, **flags)


def _check_budget_name(_context: click.Context, _parameter: click.Parameter, name: str | None) -> str | None:
    if name is None or name in TASK_KINDS or is_full_task_name(name):
        return name
    meant = did_you_mean(name, TASK_KINDS, otherwise=f"there are {', '.join(TASK_KINDS)}")
    raise click.BadParameter(f"{name!r} is no kind of task: {meant}; or give the full name of a task")


@_command(BUDGET)
@click.argument("kind", callback=_check_budget_name, required=False)
@click.option("--minimum", type=int, metavar="N", help="Slots that there always are; of a task: kept for it.")
@click.option("--maximum", type=int, metavar="N", help="Slots that there are at most.")
@worker_command_flags
@click.pass_obj
def budget(
    target: Target, /, kind: str | None, *, minimum: int | None, maximum: int | None, **flags: Any
) -> None:
    if kind is None and (minimum, maximum) != (None, None):
        raise click.UsageError(f"say of which kind: {', '.join(TASK_KINDS)}; or of which task")
    values = {"kind" if kind in TASK_KINDS else "task": kind, "minimum": minimum, "maximum": maximum}
    parameters = {key: value for key, value in values.items() if value is not None}
    _send(target.load(), BUDGET.name, parameters, **flags)


@worker.command(help=f"{RUN_TASK.help} Prints the job's id.")
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
    """Send the job to the worker and print its id."""
    app = target.load(needs_code=True)
    args, kwargs = parse_json_array(arguments, "--args"), parse_json_object(named, "--kwargs")
    echo(app.control.run(app.signature(task, *args, **kwargs), to=to, timeout=timeout).id)


@worker.command()
@click.argument("command")
@click.argument("parameters", nargs=-1, metavar="[NAME=JSON]...")
@worker_command_flags
@click.pass_obj
def tell(target: Target, /, command: str, parameters: tuple[str, ...], **flags: Any) -> None:
    """Send any COMMAND: `health`."""
    _send(target.load(), command, dict(map(parse_parameter, parameters)), **flags)


@worker.command()
@broker_flag
@processes_flag("Worker")
@serving_flags
@click.pass_obj
def start(target: Target, /, **flags: Any) -> int:
    """Run jobs until stopped.

    The first SIGTERM or Ctrl-C stops reading and lets what runs finish for the grace period; the second one exits
    at once.
    """
    app = target.load(serves=True)
    processes = flags.pop("processes")
    options = configure(app, flags)
    if processes is not None:
        app.configure(processes=processes)
    # A Controller's member is one process whatever the setting is: its group has the count.
    is_member = EPOCH_VARIABLE in os.environ
    options = replace(options, processes=processes or (1 if is_member else app.settings.processes))
    from celery5.processes.foreground import serve

    app.brokers.check()  # a URL that cannot be parsed is an error at once
    if options.processes > 1 and not app.brokers.is_multi_broker:
        from celery5.broker.calls import queues as queue_calls

        # An unreachable broker is reported once, not by each process.
        app.perform(queue_calls.list_queues(app.keys))
        app.close()
    return serve(app, options)


@worker.command("list")
@reply_flags
@click.pass_obj
def list_workers(target: Target, /, *, wants_json: bool, timeout: float) -> None:
    """Show each worker: how long it has run, what it has done, the memory it takes, and when it is recycled.

    A worker that is silent says for how long; one that was lost in the last hour is there with what it held.
    """
    app = target.load()
    with skip_unreachable(app, wants_json=wants_json):
        replies = app.control.send("stats", timeout=timeout)
        found = app.metrics.workers()
        by_name = {worker.name: worker for worker in found.workers}
        rows = [
            _row(reply, by_name.get(reply.worker), wants_json=wants_json)
            for reply in replies
            if _is_worker(reply)
        ]
        rows += [_make_lost_row(one, wants_json=wants_json) for one in found.lost]
        echo(to_json(rows) if wants_json else format_table(rows, empty=NO_WORKER))


def _is_worker(reply: "Reply") -> bool:
    """Return whether a reply is a worker's: Routers and Schedulers answer, too. A missing answer counts as one."""
    return not reply.ok or reply.answer.get("kind") == "worker"


def _make_lost_row(lost: "LostWorker", *, wants_json: bool) -> dict[str, object]:
    """Return the row of a worker that was lost."""
    if wants_json:
        return {
            "worker": lost.name,
            "state": "lost",
            "standing": lost.standing,
            "health": lost.health,
            "lost": lost,
        }
    return {
        "worker": lost.name,
        "state": lost.health,
        "up": "",
        "jobs": "",
        "running": lost.held or "",
        "memory": "",
        "report": "",
        "what it held": describe_loss(lost),
    }


def _row(reply: "Reply", seen: "WorkerOverview | None", *, wants_json: bool) -> dict[str, object]:
    """Return the row of a worker from its answer, and from what is known of it without asking."""
    stats: dict[str, Any] = reply.answer if reply.ok else {}
    max_jobs = stats.get("max_jobs")
    state = ("recycling" if stats.get("recycling") else "working") if reply.ok else str(reply.reason)
    if seen is not None and seen.standing == "silent":
        state = "silent"
    health = state if seen is None or state not in ("working", "silent") else seen.health
    reported = None if seen is None else seen.reported
    if wants_json:
        fields = ("uptime", "done", "running", "memory", "max_jobs", "max_memory")
        host = stats.get("process", {})
        of_host = {"host": host.get("host"), "pid": host.get("pid")}
        return {
            "worker": reply.worker,
            "state": state,
            **of_host,
            "standing": seen.standing if seen else "working" if reply.ok else None,
            "health": health,
            "reported": reported,
            **{name: stats.get(name) for name in fields},
        }
    return {
        "worker": reply.worker,
        "state": health if state == "silent" else state,
        "up": format_duration(stats["uptime"]) if stats else "",
        "jobs": f"{stats['done']} of {max_jobs}" if max_jobs else stats.get("done", ""),
        "running": stats.get("running", ""),
        "memory": _format_memory(stats.get("memory"), stats.get("max_memory")),
        "report": "" if reported is None else format_age(0.0, reported),
        "what it held": "",
    }


def _format_memory(used: int | None, limit: int | None) -> str:
    """Return the memory in use, and the limit if there is one."""
    if used is None:
        return ""
    return f"{format_mib(used)} of {format_mib(limit)}" if limit else format_mib(used)


def _send_queue_command(
    target: Target, command: str, queue: str, *, to: tuple[str, ...], **flags: Any
) -> None:
    """Pause or resume a queue. Without a worker the state is stored for those that start later."""
    app = target.load()
    if to:
        _send(app, command, {"queue": queue, "here": True}, to=to, **flags)
        return
    with skip_unreachable(app, wants_json=flags["wants_json"], queues=[queue]) as reached:
        app.control.workers()
        for error in reached.relevant_errors.values():
            raise error  # the pause is written to the broker that has the queue
        replies = app.control.send(command, {"queue": queue}, timeout=flags["timeout"])
        if replies:
            _print_replies(replies, command, wants_json=flags["wants_json"])
            return
    if flags["wants_json"]:
        echo(to_json([]))
    state = "paused" if command == PAUSE_QUEUE.name else "resumed"
    text = f"no worker of this application is running; those that start later find {queue} {state}"
    echo(format_cell(text), err=flags["wants_json"])


def _send(
    app: "App",
    command: str,
    parameters: Mapping[str, Any],
    *,
    to: tuple[str, ...],
    timeout: float,
    wants_json: bool,
    queues: Sequence[str] = (),
) -> None:
    with skip_unreachable(app, wants_json=wants_json, queues=queues) if not to else nullcontext():
        replies = app.control.send(command, parameters, to=to or None, timeout=timeout)
        _print_replies(replies, command, wants_json=wants_json)


def _print_replies(replies: "list[Reply]", command: str, *, wants_json: bool) -> None:
    """Print the answers of workers. Raises CommandNotDone."""
    failed = find_failures(replies)
    if len(replies) == len(failed) == 1 and not wants_json:
        raise CommandNotDone(f"{failed[0].worker} did not do it ({failed[0].reason}): {failed[0].why}")
    shown = [reply for reply in replies if reply.ok or reply in failed]
    if replies or wants_json:
        echo(to_json(replies) if wants_json else format_replies(shown, command))
    if not replies:
        raise CommandNotDone(NO_WORKER)
    if failed:
        raise CommandNotDone(f"{len(failed)} of {len(shown)} did not do it")


def format_replies(replies: "list[Reply]", command: str) -> str:
    """Return the answers as a table or stacks if the command has such, and below them those that failed."""
    if command not in TABLES and command != STACK.name:
        return _format_lines(replies)
    failed = [reply for reply in replies if not reply.ok]
    answers = [(reply.worker, reply.answer) for reply in replies if reply.ok]
    if command == STACK.name:
        parts = [format_stacks(worker, answer) for worker, answer in answers]
    else:
        parts = [format_answers(command, answers)] if answers else []
    return "\n\n".join([*parts, *([_format_lines(failed)] if failed else [])])


def _format_lines(replies: "list[Reply]") -> str:
    """Return a line for each worker: its name, whether it did the command, and its answer."""
    width = max(len(format_cell(reply.worker)) for reply in replies)
    lines = [
        f"{format_cell(reply.worker):{width}}  {'ok' if reply.ok else format_cell(reply.reason)}  "
        f"{clean_lines(to_json(reply.answer)) if reply.ok else format_cell(reply.why)}"
        for reply in replies
    ]
    return "\n".join(lines)
