"""Serve the dashboard, and make tokens for its users (`dashboard`)."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import click

from celery5.broker.servers.kept_folder import check_owned
from celery5.cli.terminal.flags import broker_flag, log_flags
from celery5.cli.terminal.output import CommandGroup, echo
from celery5.cli.terminal.target import Target
from celery5.errors import Misconfigured
from celery5.extras import describe_installation

if TYPE_CHECKING:
    from celery5.dashboard.access import Authenticator

_ROLES = click.Choice(["viewer", "operator", "admin"])


@click.group(cls=CommandGroup, no_args_is_help=False)
def dashboard() -> None:
    """The dashboard shows an application in a browser, and does what commands do."""


@dashboard.command()
@click.option("--with", "others", metavar="MODULE[:APP]", multiple=True, help="Show this application, too.")
@click.option(
    "--host",
    metavar="ADDRESS",
    default="127.0.0.1",
    envvar="CELERY5_DASHBOARD_HOST",
    help="Where to listen; another address than a loopback one needs --tokens or --proxy-user-header.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8555,
    show_default=True,
    envvar="CELERY5_DASHBOARD_PORT",
    help="0: any that is free.",
)
@click.option(
    "--socket", "path", metavar="PATH", help="Listen on a unix socket that only this user can open."
)
@click.option(
    "--tokens",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    envvar="CELERY5_DASHBOARD_TOKENS",
    help="Users and their tokens, see `dashboard token`.",
)
@click.option(
    "--proxy-user-header", metavar="NAME", help="A reverse proxy names the user in this header of requests."
)
@click.option("--proxy-role-header", metavar="NAME", default="", help="And the role in this one.")
@click.option(
    "--proxy-role", type=_ROLES, default="viewer", show_default=True, help="The role of those without one."
)
@click.option(
    "--proxy",
    "proxies",
    metavar="ADDRESS",
    multiple=True,
    help="The proxy's address; default: 127.0.0.1 and ::1, or the socket.",
)
@click.option(
    "--proxy-secret-header",
    metavar="NAME",
    default="",
    help="The header in which the proxy sends CELERY5_DASHBOARD_PROXY_SECRET; default: X-Celery5-Proxy-Secret.",
)
@click.option(
    "--public-host",
    "hosts",
    metavar="NAME[:PORT]",
    multiple=True,
    help="A name under which browsers reach it, besides localhost; others are refused.",
)
@click.option(
    "--public-url",
    metavar="URL",
    default="",
    envvar="CELERY5_DASHBOARD_PUBLIC_URL",
    help="The address that browsers have for it; with https:// cookies are sent by TLS only.",
)
@broker_flag
@log_flags
@click.pass_obj
def start(
    target: Target,
    /,
    *,
    others: Sequence[str],
    host: str,
    port: int,
    path: str | None,
    tokens: str | None,
    proxy_user_header: str | None,
    proxy_role_header: str,
    proxy_role: str,
    proxies: Sequence[str],
    hosts: Sequence[str],
    proxy_secret_header: str,
    public_url: str,
    **settings: str | None,
) -> int:
    """Serve the dashboard until stopped, and print its address.

    Without further options it listens on this host alone, and the printed address signs in once.
    """
    try:
        from celery5.dashboard.access import PROXY_SECRET_HEADER, ProxyHeaders, TokenFile, to_role
        from celery5.processes.dashboard import DashboardOptions, serve
    except ImportError:
        raise _make_missing_error() from None
    if tokens and proxy_user_header:
        raise Misconfigured("--tokens and --proxy-user-header: give only one of them")
    authenticator: Authenticator | None = TokenFile(tokens) if tokens else None
    if proxy_user_header:
        authenticator = ProxyHeaders(
            proxy_user_header,
            role_header=proxy_role_header,
            default_role=to_role(proxy_role) or "viewer",
            proxies=proxies or (("",) if path else ("127.0.0.1", "::1")),
            secret=os.environ.get("CELERY5_DASHBOARD_PROXY_SECRET", ""),
            secret_header=proxy_secret_header or PROXY_SECRET_HEADER,
        )
    options = DashboardOptions(
        host=host,
        port=port,
        path=path or "",
        authenticator=authenticator,
        hosts=hosts,
        public_url=public_url,
        secret=os.environ.get("CELERY5_DASHBOARD_SECRET") or None,
    )
    apps = [target.load(), *(Target(name).load() for name in others)]
    apps[0].configure(**settings)  # of a flag that was not given it is None, which changes nothing
    return serve(apps, options)


@dashboard.command()
@click.argument("name")
@click.option("--role", type=_ROLES, default="viewer", show_default=True, help="What this user may do.")
@click.option(
    "--expires-in",
    "days",
    type=click.FloatRange(0, 36500, min_open=True),
    metavar="DAYS",
    help="For so long; default: until the line is removed.",
)
@click.option(
    "--add-to", "file", type=click.Path(dir_okay=False), metavar="FILE", help="Add the line to this file."
)
def token(*, name: str, role: str, days: float | None, file: str | None) -> None:
    """Make a token for NAME: it is printed once, and its hash is a line for the file of `--tokens`.

    When the line is removed from the file, or the token expires, whoever has signed in with it is signed out.
    """
    try:
        from celery5.dashboard.access import hash_token, read_tokens
        from celery5.processes.dashboard import make_token
    except ImportError:
        raise _make_missing_error() from None
    new = make_token()
    line = f"{name} {role} {hash_token(new)}"
    if days is not None:
        until = datetime.now(UTC) + timedelta(days=days)
        line += f" {until.isoformat(timespec='seconds')}"
    read_tokens(line, "the name")
    if file:
        try:
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as opened:
                check_owned(os.fstat(opened.fileno()), file)
                opened.write(f"{line}\n")
        except OSError as error:
            raise Misconfigured(f"{file}: the token cannot be added there: {error.strerror}") from None
        echo(f"{name}: {role}, in {file}. The token:", err=True)
    else:
        echo(f"add this line to a file, for dashboard start --tokens FILE:\n{line}\nthe token:", err=True)
    echo(new)


def _make_missing_error() -> Misconfigured:
    return Misconfigured(f"the dashboard needs more packages: {describe_installation('dashboard')}")
