"""Dashboard: the page of a process that serves the dashboard, on sockets of its own, until stopped."""

import gc
import os
import secrets
import signal
import socket
import stat
import sys
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import trio

from celery5.app import App
from celery5.broker.ambient_trio import observe_connections
from celery5.broker.servers.kept_folder import check_owned, make_private
from celery5.dashboard.access import Authenticator, OneTimeToken, ProxyHeaders, TokenFile
from celery5.dashboard.application import Dashboard
from celery5.dashboard.hosts import AllowedHosts
from celery5.dashboard.sessions import Sessions
from celery5.errors import AlreadyInUse, Misconfigured
from celery5.logs.log import Log, LogWriter, NullLog
from celery5.processes.http_server import HttpServer
from celery5.processes.lifecycle.supported_servers import check_servers
from celery5.processes.process_log import open_log
from celery5.processes.process_parts import ConnectionLog
from celery5.protocol.masking import describe_error, escape_text
from celery5.runners.context import LOG_EVENT
from celery5.services.process.client_connections import BACKLOG

STALLED_AFTER = 10.0
"""Seconds after which the kernel ends the connection of a client that has gone without a word."""

MAX_REFUSALS = 10
"""Lines of refused sign-ins in a minute."""
WILDCARDS = ("0.0.0.0", "::", "")
"""Addresses that stand for all of this host: no browser has them in `Host`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardOptions:
    """Where the dashboard is served, and who may use it.

    Args:
        host: The address to listen on. One that is not loopback needs an `authenticator`.
        port: The port; 0 for any that is free.
        path: A unix socket to open instead; '' for none.
        authenticator: Says who makes a request; None for one-time tokens.
        hosts: Further names under which it is reached, such as those of a reverse proxy: `NAME` or `NAME:PORT`.
        public_url: The address that browsers have for it; '' for the one where it listens.
        secret: What signs sessions, of at least 32 bytes; None for one that ends with this process.
    """

    host: str = "127.0.0.1"
    port: int = 8555
    path: str = ""
    authenticator: Authenticator | None = None
    hosts: Sequence[str] = ()
    public_url: str = ""
    secret: str | None = None


def check_options(options: DashboardOptions) -> None:
    """Raise Misconfigured when the dashboard would be open to others without authentication, or a name is wrong."""
    AllowedHosts(list_hosts(options), options.public_url)
    Sessions(options.secret)
    if not options.path and options.authenticator is None and not is_loopback(options.host):
        raise Misconfigured(
            f"a dashboard on {options.host} would be open to everybody: add --tokens FILE or --proxy-user-header, "
            "or leave --host out"
        )


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this host alone."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class RefusalLog:
    """Logs refused sign-ins: MAX_REFUSALS lines in a minute at most, and how many others there were with the next line.

    Args:
        log: The log of the process.
        clock: Returns seconds.
    """

    def __init__(self, log: Log, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._minute = 0
        self._lines = self._omitted = 0

    def __call__(self, client: str, why: str) -> None:
        """Log that `client` was refused, unless there were too many."""
        minute = int(self._clock() // 60)
        if minute != self._minute:
            self._minute, self._lines = minute, 0
        if self._lines >= MAX_REFUSALS:
            self._omitted += 1
            return
        self._lines += 1
        omitted, self._omitted = self._omitted, 0
        self._log.event("dashboard:sign-in-refused", "warning", client=client, why=why, omitted=omitted)


def serve(apps: Sequence[App], options: DashboardOptions) -> int:
    """Serve the dashboard of these applications in the foreground until a signal stops it; return the exit code.

    Raises:
        Misconfigured: It would be open to others without authentication, or an address is wrong.
        AlreadyInUse: Another process has the address.
        BrokerUnsupported: A broker of an application is a Sentinel, for example.
    """
    check_options(options)
    with open_socket(options) as listening, open_log(apps[0]) as journal:
        trio.run(_serve_until_signal, apps, options, listening, journal)
    return 0


async def _serve_until_signal(
    apps: Sequence[App], options: DashboardOptions, listening: socket.socket, journal: LogWriter
) -> None:
    name = f"{socket.gethostname()}:{os.getpid()}"
    log = Log(worker=name, app=apps[0].name, writer=journal, kind="dashboard")
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:

        async def wait_for_signal() -> None:
            async for _ in signals:
                return

        for app in apps:
            await check_servers(app)
        try:
            await run(apps, options, listening, stop=wait_for_signal, say=_print_line, log=log)
        except BaseException as error:
            log.event("dashboard:stopped")
            log.finish(error)
            raise
        log.event("dashboard:stopped")
        log.finish()


async def run(
    apps: Sequence[App],
    options: DashboardOptions,
    listening: socket.socket,
    *,
    stop: Callable[[], Awaitable[None]] = trio.sleep_forever,
    say: Callable[[str], object],
    log: Log | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve on a socket until cancelled, or until `stop` returns.

    Args:
        apps: The applications.
        options: Where, and who may use it.
        listening: The socket, which is closed at the end.
        stop: Returns when it is to stop.
        say: Called with a line for whoever started it: the address, which may sign in, and warnings.
        log: The log of the process; None for none.
        task_status: Told when it listens.
    """
    log = log or NullLog()
    LOG_EVENT.set(log.event)  # actions are logged where they are recorded for the audit trail
    observe_connections(ConnectionLog(log=log))
    address = options.public_url.rstrip("/") or describe_address(options, listening)
    authenticator = options.authenticator or OneTimeToken(
        lambda token: say(f"dashboard, once more: {_describe_link(address, token)}")
    )
    dashboard = _make_dashboard(apps, options, authenticator, log, say)
    server = HttpServer(
        dashboard, on_error=lambda text: log.event("dashboard:server-failed", "error", why=text)
    )
    listening.setblocking(False)
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(server.run, listener, stop=stop))
        if isinstance(authenticator, OneTimeToken):
            say(f"dashboard: {_describe_link(address, authenticator.token)} (signs in once)")
        else:
            say(f"dashboard: {address}")
        if not options.path and options.host in WILDCARDS and not (options.hosts or options.public_url):
            say(
                "Warning: it answers to the name localhost alone: give the names of this host with --public-host"
            )
        gc.collect()
        gc.freeze()  # what is loaded by now: each full collection would stop all requests for 60 ms more
        log.event(
            "dashboard:started",
            address=address,
            apps=[app.name for app in apps],
            sign_in=describe_sign_in(authenticator),
        )
        task_status.started()


def _make_dashboard(
    apps: Sequence[App],
    options: DashboardOptions,
    authenticator: Authenticator,
    log: Log,
    say: Callable[[str], object],
) -> Dashboard:
    with warnings.catch_warnings(record=True) as unsafe:
        warnings.simplefilter("always")
        dashboard = Dashboard(
            apps,
            authenticator=authenticator,
            hosts=list_hosts(options),
            public_url=options.public_url,
            secret=options.secret,
            on_error=lambda path, error: log.event(
                "dashboard:request-failed",
                "error",
                path=path,
                why=describe_error(error),
                traceback="".join(traceback.format_exception(error)),
            ),
            on_refusal=RefusalLog(log),
        )
    for warning in unsafe:
        say(f"Warning: {warning.message}")
    return dashboard


def describe_sign_in(authenticator: Authenticator) -> str:
    """Return how users sign in, for the log."""
    match authenticator:
        case OneTimeToken():
            return "link that signs in once"
        case TokenFile():
            return "token of a file"
        case ProxyHeaders():
            return "header of a proxy"
        case _:
            return "the application"


async def run_in_development(
    app: App,
    _options: object,
    *,
    log: Log,
    done: trio.Event,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the dashboard beside a worker until cancelled: on its usual port, or on a free one when that is taken.

    `done` is that of every process, and not used.
    """
    del done
    options = DashboardOptions()
    with ExitStack() as stack:
        try:
            listening = stack.enter_context(open_socket(options))
        except AlreadyInUse:
            listening = stack.enter_context(open_socket(DashboardOptions(port=0)))
        await run([app], options, listening, say=_print_line, log=log, task_status=task_status)


def _describe_link(address: str, token: str) -> str:
    """Return what signs in, once."""
    path = f"/sign-in?token={token}"
    is_url = not address.startswith("unix:")
    return f"{address}{path}" if is_url else f"{address}, through a tunnel: http://localhost:PORT{path}"


def describe_address(options: DashboardOptions, listening: socket.socket) -> str:
    """Return the address of the dashboard for people."""
    if options.path:
        return f"unix:{options.path}"
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"http://{host}:{listening.getsockname()[1]}"


def list_hosts(options: DashboardOptions) -> Sequence[str]:
    """Return the names under which the dashboard answers besides loopback ones: the address where it listens, too."""
    if options.path or options.host in WILDCARDS:
        return options.hosts
    return (options.host.partition("%")[0], *options.hosts)


@contextmanager
def open_socket(options: DashboardOptions) -> Generator[socket.socket, None, None]:
    """Listen while the block lasts; a unix socket is removed at its end.

    Raises:
        Misconfigured: The address is none of this host, or the folder of the socket is open to others.
        AlreadyInUse: Another process has the address.
    """
    listening = _bind_path(options.path) if options.path else _bind_address(options.host, options.port)
    try:
        listening.listen(BACKLOG)
        yield listening
    finally:
        listening.close()
        if options.path:
            Path(options.path).unlink(missing_ok=True)


def _bind_address(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise Misconfigured(f"the dashboard cannot listen on {host}: {error.strerror}") from None
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALLED_AFTER * 1000))
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise AlreadyInUse(
            f"the dashboard cannot listen on {host}:{port}: {error.strerror}; choose another --port"
        ) from None
    return listening


def _bind_path(path: str) -> socket.socket:
    """Return a socket that only its owner can open, in a folder that only its owner can enter."""
    folder = Path(path).absolute().parent
    try:
        found = make_private(folder)
    except OSError as error:
        raise Misconfigured(f"the dashboard cannot listen on {path}: {error.strerror}") from None
    if found.st_mode & 0o077:
        raise Misconfigured(f"{folder} is open to others: chmod 700 {folder}, or name another folder")
    check_owned(found, str(folder))
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise Misconfigured(f"{path} is there already, and is no socket")
        _check_unused(path)
        os.unlink(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(path)
        os.chmod(path, 0o600)
    except OSError as error:
        listening.close()
        raise Misconfigured(f"the dashboard cannot listen on {path}: {error.strerror}") from None
    return listening


def _check_unused(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.settimeout(1)
        try:
            other.connect(path)
        except OSError:
            return
    raise AlreadyInUse(f"another dashboard listens on {path}")


def make_token() -> str:
    """Return a new token for a user of the dashboard."""
    return secrets.token_urlsafe(32)


def _print_line(text: str) -> None:
    sys.stderr.write(f"{escape_text(text)}\n")
    sys.stderr.flush()
