"""Controller: the commands about what keeps the processes of an application alive.

Floor: cli. Reads: nothing. Writes: what the development process writes.
"""

import os
from typing import Any

import click

from celery5.cli.serving import configure, serving_flags
from celery5.cli.target import Target
from celery5.errors import Misconfigured


@click.group(no_args_is_help=False)
def controller() -> None:
    """The controller keeps an application's processes alive."""


@controller.command()
@click.option(
    "--development", is_flag=True, help="Everything in one process, with a private server of its own."
)
@serving_flags
@click.pass_obj
def start(target: Target, /, *, development: bool, **said: Any) -> int:
    """Serve the application until stopped."""
    if not development:
        raise Misconfigured(
            "this version has the development controller only: add --development, "
            "or start workers with celery5 worker start"
        )
    app = target.load(serves=True)
    if app.config == "redis" and not os.environ.get("CELERY5_BROKER"):
        app.use_config(None)  # a server of its own begins with an empty hash
    options = configure(app, said)
    from celery5.processes.development import serve

    return serve(app, options)
