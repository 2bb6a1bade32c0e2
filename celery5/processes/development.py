"""Development: everything in one process, over its own server."""

import os
import shutil
import signal
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from importlib.util import find_spec

import trio

from celery5.app import App
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import Misconfigured
from celery5.extras import describe_installation
from celery5.logs.log import Log
from celery5.processes import foreground, publisher, router, scheduler, worker
from celery5.processes.foreground import (
    ServeOptions,
    make_interruption,
    make_stop_times,
    serve_in_process,
)
from celery5.processes.lifecycle.companions import run_companion
from celery5.processes.lifecycle.incarnations import ProcessKind, new_incarnation_name
from celery5.processes.lifecycle.signals import Interruption
from celery5.processes.process_log import open_log
from celery5.processes.publisher import PUBLISHER
from celery5.processes.router import ROUTER
from celery5.processes.scheduler import SCHEDULER
from celery5.processes.watch.sidecar import start_sidecars
from celery5.processes.worker import WorkerOptions
from celery5.protocol.masking import escape_text
from celery5.protocol.publisher.address import parse_optional_address
from celery5.sending.publisher_client import get_default_socket


def serve(app: App, options: ServeOptions, *, with_dashboard: bool = False) -> int:
    """Serve `app` in this process until stopped, and return the exit code.

    Over the broker that `CELERY5_BROKER` names, else over an embedded server that ends with this process. Raises
    ServerNotFound. The dashboard needs packages of its own: without them there is none.
    """
    foreground.check(app)
    broker = next(iter(worker.get_queues_by_broker(app, WorkerOptions(queues=options.queues))))
    with (
        # First, so that it keeps nothing open that is to end with this process.
        start_sidecars(app, (broker,), make_stop_times(app)) as sidecars,
        make_interruption(app) as interruption,
        sidecars.watching(interruption),
        provide_broker(app, interruption) as url,
        open_log(app, name=options.name) as journal,
    ):
        if not os.environ.get("CELERY5_BROKER"):
            sys.stderr.write(f"producers reach this server with CELERY5_BROKER='{url}'\n")
        _sign(app)
        worker_options = WorkerOptions(
            queues=options.queues,
            burst=options.burst,
            name=options.name,
            sidecars=sidecars.by_broker,
            log_writer=journal,
            has_router=router.is_needed(app),
        )
        companions = (
            *find_publisher(app),
            *find_companions(app),
            *(find_dashboard() if with_dashboard else ()),
        )
        trio.run(partial(serve_in_process, companions=companions), app, worker_options, interruption)
    return 0


def _sign(app: App) -> None:
    """Create keys to sign commands with, unless some exist or commands need no signature.

    They are for this application alone, in a folder of mode 0700.
    """
    settings, keyring = app.settings, app.control.keyring
    if not (settings.inbox and settings.inbox_signatures):
        return
    try:
        if keyring.create_keys():
            sys.stderr.write(f"commands are signed with new keys, in {keyring.folder}\n")
    except Misconfigured as error:
        sys.stderr.write(f"Warning: commands cannot be signed: {escape_text(str(error))}\n")


def find_companions(app: App) -> tuple[ProcessKind, ...]:
    """Return the processes needed beside the worker: a Router and a Scheduler, if the application has work for them."""
    routing = (ROUTER,) if router.is_needed(app) else ()
    return (*routing, SCHEDULER) if scheduler.is_needed(app) else routing


def find_publisher(app: App) -> tuple[ProcessKind, ...]:
    """Return a Publisher, if this application's producers send by one that would listen where this one does."""
    address = parse_optional_address(app.settings.publisher)
    if address is None:
        return ()
    plan = publisher.make_listen_plan(app)
    if address.host:
        is_ours = plan.tcp == (address.host, address.port)
    else:
        is_ours = plan.path == (address.path or str(get_default_socket(app.name)))
    if not is_ours:
        sys.stderr.write(f"jobs are sent by the Publisher at {address}, which is not started here\n")
    return (PUBLISHER,) if is_ours else ()


def find_dashboard() -> tuple[ProcessKind, ...]:
    """Return what serves the dashboard; nothing where its packages are not installed."""
    if not all(map(find_spec, ("h11", "jinja2", "starlette"))):
        sys.stderr.write(f"there is a dashboard, too: {describe_installation('dashboard')}\n")
        return ()
    return (ProcessKind("dashboard", _run_dashboard, lambda app: None),)


async def _run_dashboard(
    app: App, options: object, *, log: Log, done: trio.Event, task_status: trio.TaskStatus[None]
) -> None:
    """Serve the dashboard until cancelled. Loading it is part of that: it may fail, and the worker runs on."""
    from celery5.processes.dashboard import run_in_development

    await run_in_development(app, options, log=log, done=done, task_status=task_status)


@contextmanager
def provide_broker(app: App, interruption: Interruption | None = None) -> Generator[str, None, None]:
    """Yield the URL of a broker for `app`: the configured one, else an embedded server that runs during the block.

    An `interruption` that ends the process at once removes the server first.
    """
    configured = os.environ.get("CELERY5_BROKER")
    if configured:
        app.use_broker(configured)
        yield configured
        return
    with EmbeddedServer.start() as server:
        app.use_broker(server.url)
        if interruption is not None:
            interruption.set_exit_hook(partial(_remove, server))
        try:
            yield server.url
        finally:
            app.close()


def _remove(server: EmbeddedServer) -> None:
    """Kill the server without waiting; its watcher removes what is left."""
    if server.pid:
        os.kill(server.pid, signal.SIGKILL)
    shutil.rmtree(server.folder, ignore_errors=True)


@asynccontextmanager
async def run_in_background(
    app: App, options: ServeOptions, *, with_schedules: bool | None = None, with_router: bool = True
) -> AsyncGenerator[trio.Event, None]:
    """Run a worker for `app` in this Trio run: it is up when the block begins, and stops in order when it ends.

    The application must have a broker (`provide_broker`). Yields the event that a burst sets when all is done.

    Args:
        with_schedules: Whether there is a Scheduler; None: if the application has work for one.
        with_router: Whether there may be a Router.
    """
    worker_options = WorkerOptions(
        queues=options.queues,
        burst=options.burst,
        name=options.name,
        incarnation=new_incarnation_name(options.name),
        has_router=router.is_needed(app),
        reads_alone=True,
    )
    log = Log(worker=worker_options.incarnation, app=app.name)
    done = trio.Event()
    async with trio.open_nursery() as nursery:
        needs_scheduler = scheduler.is_needed(app) if with_schedules is None else with_schedules
        companions = (
            *((ROUTER,) if with_router and router.is_needed(app) else ()),
            *((SCHEDULER,) if needs_scheduler else ()),
        )
        for companion in companions:
            await nursery.start(partial(run_companion, companion, app, None, lambda: None))
        await nursery.start(partial(worker.run, app, worker_options, log=log, done=done))
        try:
            yield done
        finally:
            nursery.cancel_scope.cancel()
            log.finish()
