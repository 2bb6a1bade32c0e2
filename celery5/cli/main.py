"""Main: the `celery5` command and the tree of its commands.

Floor: cli. Reads: CELERY5_APP, the command's arguments. Writes: nothing itself.

Trio, Redis and the user's modules are imported by the commands that need them, when they run: `--help` stays quick.
"""

import atexit
import os
import sys
import threading
from collections.abc import Sequence

import click

import celery5
from celery5.cli.boundary import USAGE, guarded
from celery5.cli.controller import controller
from celery5.cli.demo import demo
from celery5.cli.dlq import dlq
from celery5.cli.health import health
from celery5.cli.info import info
from celery5.cli.keys import keys
from celery5.cli.queue import queue
from celery5.cli.scheduler import scheduler
from celery5.cli.target import Target
from celery5.cli.task import task
from celery5.cli.worker import worker

THREADS_LIMIT = 2.0
"""Seconds that threads get which are left when a command is done."""


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-A",
    "--app",
    "target",
    metavar="MODULE[:APP]",
    envvar="CELERY5_APP",
    default="",
    show_envvar=True,
    help="The application: a module, and its App when it has several.",
)
@click.version_option(celery5.__version__, message="celery5 %(version)s")
@click.pass_context
def cli(context: click.Context, target: str) -> None:
    """Run Python functions somewhere else, soon, and surely."""
    context.obj = Target(target)
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(USAGE)


for each in (worker, controller, scheduler, info, health, queue, task, dlq, keys, demo):
    cli.add_command(each)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code.

    Threads that its jobs have left behind (`asyncio.to_thread`, say) cannot be ended. The interpreter would wait for
    them for ever: they get THREADS_LIMIT seconds.
    """
    code = guarded(lambda: cli.main(arguments, prog_name="celery5", standalone_mode=False))
    if threading.active_count() > 1:  # daemons, too: an executor's threads are waited for whatever they are
        limit = threading.Timer(THREADS_LIMIT, os._exit, (code,))
        limit.daemon = True
        limit.start()
        atexit.register(limit.cancel)  # which runs when the threads have been waited for
    sys.exit(code)
