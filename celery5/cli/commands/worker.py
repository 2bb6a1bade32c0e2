"""Start workers, list them, send them commands, and show what each of them answers."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import click

from celery5.cli.terminal.errors import skip_unreachable
from celery5.cli.terminal.flags import Duration
from celery5.cli.terminal.operation_commands import CommandView, Finished, make_group
from celery5.cli.terminal.output import (
    as_called,
    clean_lines,
    echo,
    format_cell,
    format_progress,
    format_table,
    to_json,
)
from celery5.cli.terminal.target import Target
from celery5.errors import CeleryError
from celery5.operations.answers import OTHER_VERSION
from celery5.operations.operation import Changed
from celery5.operations.processes import PROCESS_OPERATIONS, check_recipients
from celery5.protocol.commands.definitions import RUN_TASK, STACK
from celery5.protocol.durations import format_age, format_duration
from celery5.protocol.observability.overview import IS_REPAIRED, NO_REPORT_YET, describe_loss
from celery5.protocol.process.recycling import format_mib
from celery5.protocol.scaling.budget import is_full_task_name
from celery5.protocol.scaling.resource_budget import read_use, show_use
from celery5.protocol.scaling.slot_use import format_slots, read_slots
from celery5.protocol.task_kinds import TASK_KINDS
from celery5.protocol.text_values import parse_parameter
from celery5.similar_names import did_you_mean

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.commands.control import Reply
    from celery5.errors import BrokerError
    from celery5.operations.processes import ProcessReply
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
        "slots": format_slots(read_slots(numbers.get("slots"))),
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


class CommandNotDone(CeleryError):
    """A worker did not do what a command asks, or there is no worker to do it."""


def make_timeout_flag(most: float = 3600) -> click.Option:
    """Return the flag for how long answers are waited for: also on the answer of a process that has yet to start."""
    return click.Option(
        ["--timeout"],
        type=Duration(0.01, most),
        default=5.0,
        show_default=True,
        metavar="SECONDS",
        help="How long answers are waited for. Unless it is given, a name that no process has is refused at once.",
    )


def get_replies(result: Any) -> "list[Reply]":
    """Return the replies in the result of an operation on processes, each as the process has sent it."""
    from celery5.commands.control import Reply

    if isinstance(result, Changed):
        return cast("list[Reply]", result.value)
    return [
        Reply(
            worker=reply.process,
            # What a worker says is shown whatever its version is.
            ok=reply.ok or reply.reason == OTHER_VERSION,
            answer=reply.answer,
            reason="" if reply.reason == OTHER_VERSION else reply.reason,
            why="" if reply.reason == OTHER_VERSION else reply.why,
            concerned=reply.concerned,
        )
        for reply in cast("list[ProcessReply]", result)
    ]


def _explain_no_worker(app: "App") -> str:
    """Return that no worker runs, and how one is started."""
    start = app.info(limit=0).start_advice.format_start("worker")
    return as_called(f"no worker of this application is running: {start}")


def show_replies(command: str, finished: Finished) -> None:
    """Print the answers of workers. Raises CommandNotDone."""
    from celery5.commands.control import find_failures

    replies, wants_json = get_replies(finished.result), finished.wants_json
    failed = find_failures(replies)
    if len(replies) == len(failed) == 1 and not wants_json:
        raise CommandNotDone(f"{failed[0].worker} did not do it ({failed[0].reason}): {failed[0].why}")
    shown = [reply for reply in replies if reply.ok or reply in failed]
    if replies or wants_json:
        echo(to_json(replies) if wants_json else format_replies(shown, command))
    if not replies:
        raise CommandNotDone(_explain_no_worker(finished.app))
    if failed:
        raise CommandNotDone(f"{len(failed)} of {len(shown)} did not do it")


def _check_budget_name(_context: click.Context, _parameter: click.Parameter, name: str | None) -> str | None:
    if name is None or name in TASK_KINDS or is_full_task_name(name):
        return name
    meant = did_you_mean(name, TASK_KINDS, otherwise=f"there are {', '.join(TASK_KINDS)}")
    raise click.BadParameter(f"{name!r} is no kind of task: {meant}; or give the full name of a task")


def _prepare_budget(given: dict[str, Any], _flags: Mapping[str, Any]) -> dict[str, Any]:
    """Tell a kind of task from a task."""
    kind = given.pop("kind", None)
    if kind is None and {"minimum", "maximum"} & given.keys():
        raise click.UsageError(f"say of which kind: {', '.join(TASK_KINDS)}; or of which task")
    return given if kind is None else {"kind" if kind in TASK_KINDS else "task": kind, **given}


def _parse_parameters(_context: click.Context, _parameter: click.Parameter, words: Sequence[str]) -> Any:
    return dict(map(parse_parameter, words))


def _goes_to_all(asked: Any) -> bool:
    return not asked.to


def _check_names(
    app: "App",
    asked: Any,
    errors: "Mapping[str, BrokerError]",
    *,
    before: "Callable[[App, Any, Mapping[str, BrokerError]], object] | None" = None,
) -> object:
    """Raise NotFound for a worker that does not live, unless --timeout says how long one that starts is waited for."""
    import trio  # when a command runs, and not for its help

    source = click.get_current_context().get_parameter_source("timeout")
    names: list[str] = [asked.to] if isinstance(asked.to, str) else asked.to
    if names and source is click.core.ParameterSource.DEFAULT:
        trio.run(check_recipients, app, names)
    return before(app, asked, errors) if before else None


def make_worker_view(verb: str, view: CommandView) -> CommandView:
    """Return the view of a command to workers: each has its line, whatever it answers."""
    return replace(
        view,
        before=partial(_check_names, before=view.before),
        show=view.show or partial(show_replies, verb),
        parameters={"timeout": make_timeout_flag(), **view.parameters},
        asks=False,
        missing=(),
        skips_unreachable=_goes_to_all,
    )


VIEWS: Mapping[str, CommandView] = {
    "budget": CommandView(
        parameters={
            "kind": click.Argument(["kind"], callback=_check_budget_name, required=False),
            "task": None,
        },
        prepare=_prepare_budget,
    ),
    "shutdown": CommandView(
        parameters={
            "how": click.Option(
                ["--cold", "how"],
                flag_value="cold",
                help="Give back what runs now, rather than wait for it to end.",
            )
        }
    ),
    "tell": CommandView(
        help="Send any COMMAND, such as one that the application has declared.",
        show=lambda finished: show_replies(finished.asked.command, finished),
        parameters={
            "parameters": click.Argument(
                ["parameters"], nargs=-1, metavar="[NAME=JSON]...", callback=_parse_parameters
            )
        },
    ),
}
"""What commands show and take beside what follows from the operations on workers, by their verbs."""
RUN = CommandView(
    before=_check_names,
    parameters={"timeout": make_timeout_flag(60)},
    text=lambda changed: str(changed.value["id"]),
    needs_code=True,
    help=f"{RUN_TASK.help} Prints the job's id.",
)
worker = make_group(
    "worker",
    "Start workers, and send them commands.",
    PROCESS_OPERATIONS,
    {
        operation.verb: RUN
        if operation.verb == "run"
        else make_worker_view(operation.verb, VIEWS.get(operation.verb, CommandView()))
        for operation in PROCESS_OPERATIONS
        if operation.noun == "worker"
    },
)


# By hand, since it joins what workers answer with what is known of those that do not.
@worker.command("list", params=[make_timeout_flag()])
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def list_workers(target: Target, /, *, wants_json: bool, timeout: float) -> None:
    """Show each worker: how long it has run, what it has done, the memory it takes, and when it is recycled.

    A worker that is silent says for how long; one that was lost in the last hour is there with what it held, and
    whether that is repaired.
    """
    app = target.load()
    with skip_unreachable(app, wants_json=wants_json):
        replies = app.control.send("stats", timeout=timeout)
        found = app.metrics.workers()
        by_name = {worker.name: worker for worker in found.workers}
        rows = [
            make_worker_row(reply, by_name.get(reply.worker), wants_json=wants_json)
            for reply in replies
            if _is_worker(reply)
        ]
        rows += [_make_lost_row(process, wants_json=wants_json) for process in found.lost]
        if not wants_json and not any(row["resources"] for row in rows):
            rows = [{name: cell for name, cell in row.items() if name != "resources"} for row in rows]
        if not rows and not wants_json:
            echo(_explain_no_worker(app))
            return
        echo(to_json(rows) if wants_json else format_table(rows, empty=""))


def _is_worker(reply: "Reply") -> bool:
    """Return whether a reply is a worker's: Routers and Schedulers answer, too. A missing answer counts as one."""
    return not reply.ok or reply.answer.get("kind") == "worker"


def _make_lost_row(lost: "LostWorker", *, wants_json: bool) -> dict[str, object]:
    """Return the row of a worker that was lost."""
    if wants_json:
        return {
            "worker": lost.name,
            "state": IS_REPAIRED if lost.is_repaired else "lost",
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
        "resources": "",
        "memory": "",
        "report": "",
        "what it held": describe_loss(lost),
    }


def make_worker_row(reply: "Reply", seen: "WorkerOverview | None", *, wants_json: bool) -> dict[str, object]:
    """Return the row of a worker from its answer, and from what is known of it without asking."""
    stats: dict[str, Any] = reply.answer if reply.ok else {}
    max_jobs = stats.get("max_jobs")
    state = ("recycling" if stats.get("recycling") else "working") if reply.ok else str(reply.reason)
    if seen is not None and seen.standing == "silent":
        state = "silent"
    elif seen is not None and seen.health == NO_REPORT_YET and reply.reason == "no-answer":
        state = "starting"  # it has never reported: it has its lease, and does not read its inbox yet
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
            "resources": read_use(stats.get("resources")),
        }
    return {
        "worker": reply.worker,
        "state": health if state == "silent" else state,
        "up": format_duration(stats["uptime"]) if stats else "",
        "jobs": f"{stats['done']} of {max_jobs}" if max_jobs else stats.get("done", ""),
        "running": stats.get("running", ""),
        "resources": show_use(read_use(stats.get("resources"))),
        "memory": _format_memory(stats.get("memory"), stats.get("max_memory")),
        "report": "" if reported is None else format_age(0.0, reported),
        "what it held": "",
    }


def _format_memory(used: int | None, limit: int | None) -> str:
    """Return the memory in use, and the limit if there is one."""
    if used is None:
        return ""
    return f"{format_mib(used)} of {format_mib(limit)}" if limit else format_mib(used)


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
    """Return a line for each worker: its name, whether it did the command, and its answer.

    Where several failed for the same reason, that is stated once, below.
    """
    width = max(len(format_cell(reply.worker)) for reply in replies)
    counts = Counter(reply.why for reply in replies if not reply.ok)
    shared = {why: f"({number})" for number, why in enumerate((w for w in counts if counts[w] > 1), 1)}
    lines = [
        f"{format_cell(reply.worker):{width}}  {'ok' if reply.ok else format_cell(reply.reason)}  "
        f"{clean_lines(to_json(reply.answer)) if reply.ok else shared.get(reply.why) or format_cell(reply.why)}"
        for reply in replies
    ]
    return "\n".join([*lines, *(f"{mark} {format_cell(why)}" for why, mark in shared.items())])
