"""Scheduler: the commands about Schedulers."""

from typing import Any

import click

from celery5.cli.terminal.flags import auxiliary_process_flags, configure
from celery5.cli.terminal.target import Target


@click.group(no_args_is_help=False)
def scheduler() -> None:
    """Schedulers publish periodic tasks, and decide what is decided for a whole cluster."""


@scheduler.command()
@auxiliary_process_flags
@click.pass_obj
def start(target: Target, /, **said: Any) -> int:
    """Be a Scheduler until stopped. There may be any number of them."""
    app = target.load(serves=True)
    options = configure(app, said)
    from celery5.processes.lifecycle.foreground import serve
    from celery5.processes.scheduler import SCHEDULER

    app.brokers.check()  # a URL that cannot be understood is told of at once
    return serve(app, options, SCHEDULER)
