"""Start processes: Workers, Routers, Schedulers and Publisher daemons."""

import os
from importlib import import_module
from typing import Any

import click
from msgspec.structs import replace

from celery5.cli.terminal.flags import (
    auxiliary_process_flags,
    broker_flag,
    configure,
    processes_flag,
    serving_flags,
)
from celery5.cli.terminal.output import CommandGroup
from celery5.cli.terminal.target import Target
from celery5.protocol.cluster.leadership import EPOCH_VARIABLE

_FILE = click.Path(dir_okay=False)


# Commands by hand, since each runs a process until that is stopped.


class _WorkerCommands(CommandGroup):
    """The commands on workers. `start` is found without the others and their operations: a worker starts sooner."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, sorted."""
        self._add_others()
        return super().list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of this name, or None."""
        if cmd_name != "start":
            self._add_others()
        return super().get_command(ctx, cmd_name)

    def _add_others(self) -> None:
        for command in import_module("celery5.cli.commands.worker").worker.commands.values():
            self.add_command(command)


@click.group(cls=_WorkerCommands, no_args_is_help=False)
def worker() -> None:
    """Start workers, and send them commands."""


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


@click.group(cls=CommandGroup, no_args_is_help=False)
def router() -> None:
    """Routers take in events and data, and make jobs of them."""


@router.command("start")
@processes_flag("Router")
@auxiliary_process_flags
@click.pass_obj
def start_router(target: Target, /, **flags: Any) -> int:
    """Run a Router until stopped. There may be any number of them.

    The first SIGTERM or Ctrl-C stops reading and ends what is under way; the second one exits at once.
    """
    app = target.load(serves=True)
    options = configure(app, flags)
    from celery5.processes.foreground import serve
    from celery5.processes.router import ROUTER

    app.brokers.check()  # a URL that cannot be parsed is an error at once
    return serve(app, options, ROUTER)


@click.group(cls=CommandGroup, no_args_is_help=False)
def scheduler() -> None:
    """Schedulers publish periodic tasks, and decide what is decided for a whole cluster."""


@scheduler.command("start")
@auxiliary_process_flags
@click.pass_obj
def start_scheduler(target: Target, /, **flags: Any) -> int:
    """Run a Scheduler until stopped. There may be any number of them."""
    app = target.load(serves=True)
    options = configure(app, flags)
    from celery5.processes.foreground import serve
    from celery5.processes.scheduler import SCHEDULER

    app.brokers.check()  # a URL that cannot be parsed is an error at once
    return serve(app, options, SCHEDULER)


@click.group(cls=CommandGroup, no_args_is_help=False)
def publisher() -> None:
    """A Publisher takes jobs from the processes of a host, keeps them, and publishes them."""


@publisher.command("start")
@click.option(
    "--socket",
    "publisher_socket",
    type=_FILE,
    metavar="PATH",
    help="The unix socket to open; default: in the user's folder for these.",
)
@click.option("--tcp", "publisher_tcp", metavar="HOST:PORT", help="Listen there, too.")
@click.option(
    "--certificate", "publisher_certificate", type=_FILE, metavar="FILE", help="Then TCP speaks TLS."
)
@click.option("--key", "publisher_key", type=_FILE, metavar="FILE", help="The certificate's key.")
@click.option(
    "--client-ca",
    "publisher_client_ca",
    type=_FILE,
    metavar="FILE",
    help="Take only TCP clients whose certificate this authority has signed.",
)
@click.option(
    "--plain/--no-plain",
    "publisher_plain",
    default=None,
    help="Whether TCP beyond this host may go without TLS; default: no.",
)
@click.option(
    "--backlog",
    "publisher_backlog",
    metavar="WHERE",
    help="What to keep messages in: sqlite, memory, a folder, or module:name; default: sqlite.",
)
@click.option(
    "--connections", "publisher_connections", metavar="N..M", help="Connections to a broker; default: 1."
)
@auxiliary_process_flags
@click.pass_obj
def start_publisher(target: Target, /, **flags: Any) -> int:
    """Run a Publisher until stopped. One for an application is enough for a host."""
    app = target.load(serves=True)
    own = {name: flags.pop(name) for name in list(flags) if name.startswith("publisher_")}
    options = configure(app, flags)
    app.configure(**own)
    from celery5.processes.foreground import serve
    from celery5.processes.publisher import PUBLISHER

    _ = app.connections.endpoint  # a URL that cannot be parsed is an error at once
    return serve(app, options, PUBLISHER)
