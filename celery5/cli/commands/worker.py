"""Roll: the workers that live, a line for each."""

from typing import TYPE_CHECKING, Any

import click

from celery5.cli.commands.control import COMMANDS, NO_WORKER, reply_flags
from celery5.cli.terminal.flags import broker_flag, configure, processes_flag, serving_flags
from celery5.cli.terminal.output import echo, format_duration, format_table, to_json
from celery5.cli.terminal.partial import skip_unreachable
from celery5.cli.terminal.target import Target
from celery5.protocol.process.recycling import format_mib

if TYPE_CHECKING:
    from celery5.commands.control import Reply


@click.command("list")
@reply_flags
@click.pass_obj
def list_workers(target: Target, /, *, wants_json: bool, timeout: float) -> None:
    """Show each worker: how long it has run, what it has done, the memory it takes, and when it is recycled."""
    app = target.load()
    with skip_unreachable(app, wants_json=wants_json):
        replies = app.control.send("stats", timeout=timeout)
        rows = [_row(each, wants_json=wants_json) for each in replies if _is_worker(each)]
        echo(to_json(rows) if wants_json else format_table(rows, empty=NO_WORKER))


def _is_worker(reply: "Reply") -> bool:
    """Routers and Schedulers answer, too; of who does not, nobody knows."""
    return not reply.ok or reply.answer.get("kind") == "worker"


def _row(reply: "Reply", *, wants_json: bool) -> dict[str, object]:
    said: dict[str, Any] = reply.answer if reply.ok else {}
    jobs, memory = said.get("max_jobs"), said.get("max_memory")
    state = ("recycling" if said.get("recycling") else "up") if reply.ok else reply.reason
    if wants_json:
        plain = ("uptime", "done", "running", "memory", "max_jobs", "max_memory")
        host = said.get("process", {})
        of_host = {"host": host.get("host"), "pid": host.get("pid")}
        return {"worker": reply.worker, "state": state, **of_host, **{name: said.get(name) for name in plain}}
    return {
        "worker": reply.worker,
        "state": state,
        "up": format_duration(said["uptime"]) if said else "",
        "jobs": f"{said['done']} of {jobs}" if jobs else said.get("done", ""),
        "running": said.get("running", ""),
        "memory": _memory(said.get("memory"), memory),
    }


def _memory(now: int | None, most: int | None) -> str:
    """What it takes, and may."""
    if now is None:
        return ""
    return f"{format_mib(now)} of {format_mib(most)}" if most else format_mib(now)


@click.group(no_args_is_help=False)
def worker() -> None:
    """Workers run jobs, and do what they are told."""


for each in COMMANDS:
    worker.add_command(each)
worker.add_command(list_workers)


@worker.command()
@broker_flag
@processes_flag("Worker")
@serving_flags
@click.pass_obj
def start(target: Target, /, **said: Any) -> int:
    """Run jobs until stopped.

    The first SIGTERM or Ctrl-C stops reading and lets what runs finish for the grace period; the second one exits
    at once.
    """
    app = target.load(serves=True)
    options = configure(app, said)
    from celery5.processes.lifecycle.foreground import serve

    app.brokers.check()  # a URL that cannot be understood is told of at once
    if options.processes > 1 and not app.brokers.is_multi_broker:
        from celery5.broker.calls import jobs

        # A broker that is away is told of once, too, not by each process.
        app.perform(jobs.list_queues(app.keys))
        app.close()
    return serve(app, options)
