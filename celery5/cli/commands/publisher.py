"""Publisher: the commands about Publisher daemons."""

from typing import Any

import click

from celery5.cli.terminal.flags import auxiliary_process_flags, configure
from celery5.cli.terminal.target import Target

_FILE = click.Path(dir_okay=False)


@click.group(no_args_is_help=False)
def publisher() -> None:
    """A Publisher takes jobs from the processes of a host, keeps them, and publishes them."""


@publisher.command()
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
    "--connections",
    "publisher_connections",
    metavar="N..M",
    help="Connections to a broker; default: 1.",
)
@auxiliary_process_flags
@click.pass_obj
def start(target: Target, /, **said: Any) -> int:
    """Be a Publisher until stopped. One for an application is enough for a host."""
    app = target.load(serves=True)
    own = {name: said.pop(name) for name in list(said) if name.startswith("publisher_")}
    options = configure(app, said)
    app.configure(**own)
    from celery5.processes.lifecycle.foreground import serve
    from celery5.processes.publisher import PUBLISHER

    _ = app.connections.endpoint  # a URL that cannot be understood is told of at once
    return serve(app, options, PUBLISHER)
