"""Worker: the commands about workers.

Floor: cli. Reads: nothing. Writes: what a worker writes.
"""

from typing import Any

import click

from celery5.cli.control import COMMANDS
from celery5.cli.roll import list_workers
from celery5.cli.serving import broker_flag, configure, processes_flag, serving_flags
from celery5.cli.target import Target


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
    from celery5.processes.foreground import serve

    app.brokers.check()  # a URL that cannot be understood is told of at once
    if options.processes > 1 and not app.brokers.is_multi_broker:
        from celery5.broker import calls

        # A broker that is away is told of once, too, not by each process.
        app.perform(calls.list_queues(app.keys), instead="aperform")
        app.close()
    return serve(app, options)
