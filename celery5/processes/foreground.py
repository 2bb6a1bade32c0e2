"""Foreground: serves one application as one worker process, or as several, until told to stop.

Floor: processes. Reads: signals. Writes: the log.
"""

import gc
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import trio

from celery5.app import App
from celery5.log import Format, Level, Log
from celery5.processes import fleet, worker
from celery5.processes.own_log import own_log
from celery5.processes.signals import Interruption
from celery5.processes.understudy import standing_by
from celery5.processes.worker import WorkerOptions
from celery5.services.status_port import StatusPort
from celery5.services.vitals import Vitals

STOP_LIMIT = 40.0
"""Seconds beyond the grace period after which a process that was told to stop is ended. The parent of several has more
patience, and systemd more again."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How an application is served: which `queues` (none: all that its tasks name), whether to end when all is done
    (`burst`), under which `name`, by how many `processes`, whether to `reload` a configuration that changes, and how it
    logs."""

    queues: tuple[str, ...] = ()
    burst: bool = False
    name: str = ""
    processes: int = 1
    reload: bool = True
    log_format: Format = "auto"
    log_level: Level = "info"


def serve(app: App, options: ServeOptions) -> int:
    """Serve until stopped; gives the exit code: 0 when all ended as it was asked to.

    Raises BrokerError when Redis cannot be reached at the start or lets nobody in.
    """
    ready, retire, name = _nothing, _nothing, options.name
    worker.check(app)
    if options.processes > 1:
        part = fleet.supervise(app, processes=options.processes, burst=options.burst)
        if isinstance(part, int):
            return part
        ready, retire = part.ready, part.retire
        name = name and f"{name}.{part.number}"
    with (
        standing_by(app) as understudy,
        stopping(app) as interruption,
        own_log(app, options.log_format, options.log_level, processes=options.processes) as journal,
    ):
        told = WorkerOptions(
            options.queues,
            options.burst,
            name,
            understudy=understudy,
            reload=options.reload,
            journal=journal,
            processes=options.processes,
        )
        trio.run(serve_here, app, told, interruption, ready, retire)
    return 0


def stopping(app: App) -> Interruption:
    """What stops a process that serves `app`."""
    return Interruption(limit=app.settings.grace_period + STOP_LIMIT)


async def serve_here(
    app: App,
    options: WorkerOptions,
    interruption: Interruption,
    told: Callable[[], None] = lambda: None,
    retiring: Callable[[], None] = lambda: None,
) -> None:
    """Be one worker in this Trio run until a signal, a command, or until a burst is done. `told` is called when it
    consumes, `retiring` when it ends because it was commanded to: then nobody need replace it."""
    vitals = Vitals(app=app.name)
    options = replace(
        options, incarnation=worker.new_name(options.name), vitals=vitals, stuck=interruption.must_end
    )
    log = Log(worker=options.incarnation, app=app.name, journal=options.journal)
    done = trio.Event()
    if options.understudy is not None:
        log.event("worker:understudy", "debug", pid=options.understudy.pid)
    port = StatusPort(
        vitals=vitals,
        log=log,
        port=app.settings.status_port,
        host=app.settings.status_host,
        ports=options.processes,
    )
    try:
        async with trio.open_nursery() as around:  # probes are answered until the last job is settled
            await around.start(port.run)
            async with trio.open_nursery() as nursery:
                interruption.ends(_asking(nursery.cancel_scope, log, vitals))

                def tell() -> None:
                    interruption.must_end()
                    if not options.burst:
                        retiring()

                nursery.start_soon(_stop_when, done, nursery.cancel_scope, vitals, tell)
                await worker.run(app, options, log=log, done=done, task_status=_Ready(log, told))
            around.cancel_scope.cancel()
    except BaseException as error:
        log.event("worker:stopped")
        log.finish(error)
        raise
    log.event("worker:stopped")
    log.finish()


def _asking(scope: trio.CancelScope, log: Log, vitals: Vitals) -> Callable[[signal.Signals], None]:
    """What asks the worker in `scope` to stop; it may be called in a signal handler, and after the run."""
    token = trio.lowlevel.current_trio_token()

    def stop(number: signal.Signals) -> None:
        log.event(
            "process:stopping", signal=number.name, hint="finishing what runs; once more to exit at once"
        )
        vitals.stopping()
        scope.cancel()

    def ask(number: signal.Signals) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(stop, number)

    return ask


class _Ready(trio.TaskStatus[None]):
    """Says in the log that the worker consumes, and tells the collector that what is loaded by now stays."""

    def __init__(self, log: Log, told: Callable[[], None]) -> None:
        self._log = log
        self._told = told

    def started(self, value: None = None) -> None:
        gc.collect()
        gc.freeze()
        self._told()
        self._log.event("worker:ready")


def _nothing() -> None:
    """Nobody wants to know that this worker is ready."""


async def _stop_when(
    done: trio.Event, scope: trio.CancelScope, vitals: Vitals, tell: Callable[[], None]
) -> None:
    await done.wait()
    vitals.stopping()
    tell()
    scope.cancel()
