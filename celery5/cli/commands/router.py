"""Router: the commands about Routers."""

from typing import Any

import click

from celery5.cli.terminal.flags import auxiliary_process_flags, configure, processes_flag
from celery5.cli.terminal.target import Target


@click.group(no_args_is_help=False)
def router() -> None:
    """Routers take in events and data, and make jobs of them."""


@router.command()
@processes_flag("Router")
@auxiliary_process_flags
@click.pass_obj
def start(target: Target, /, **said: Any) -> int:
    """Be a Router until stopped. There may be any number of them.

    The first SIGTERM or Ctrl-C stops reading and ends what is under way; the second one exits at once.
    """
    app = target.load(serves=True)
    options = configure(app, said)
    from celery5.processes.lifecycle.foreground import serve
    from celery5.processes.router import ROUTER

    app.brokers.check()  # a URL that cannot be understood is told of at once
    return serve(app, options, ROUTER)
