"""Foreground: serves one application as one process, a worker unless said otherwise, or as several, until told to stop.

Floor: processes. Reads: signals. Writes: the log.
"""

import gc
import os
import signal
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

import trio

from celery5.app import App
from celery5.log import Format, Level, Log, LogWriter
from celery5.processes import fleet, worker
from celery5.processes.again import get_restart_mode, re_execute
from celery5.processes.fence import check_controller_epoch
from celery5.processes.lives import ProcessKind, new_incarnation_name
from celery5.processes.loop_watch import LoopWatchdog
from celery5.processes.own_log import open_log
from celery5.processes.signals import Interruption
from celery5.processes.stacks import StackDump
from celery5.processes.understudy import Understudy, start_sidecar
from celery5.processes.worker import WorkerOptions
from celery5.protocol.recycling import RESTART_EXIT_CODE
from celery5.services.reloader import ReloadSignal
from celery5.services.status_port import StatusPort
from celery5.services.systemd_notify import read_notify_settings
from celery5.services.vitals import ProcessStatus

STOP_LIMIT = 40.0
"""Seconds beyond the grace period after which a process that was told to stop is ended. The parent of several has more
patience, and systemd more again."""
WORKER = ProcessKind("worker", worker.run, worker.check, has_sidecar=True)
"""What runs jobs."""


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


def serve(app: App, options: ServeOptions, kind: ProcessKind = WORKER) -> int:
    """Serve until stopped, as what `page` says; gives the exit code: 0 when all ended as it was asked to,
    RECYCLED when whoever has started it is to start the next one. Without such a one it begins again itself.

    Raises BrokerError when Redis cannot be reached at the start or lets nobody in.
    """
    ready, retire, name = _nothing, _nothing, options.name
    anew = get_restart_mode(os.environ, processes=options.processes)
    kind.check(app)
    introduced = check_controller_epoch(app, without_redis=kind.name == "publisher")
    if options.processes > 1:
        part = fleet.supervise(app, processes=options.processes, burst=options.burst, kind=kind.name)
        if isinstance(part, int):
            return part
        ready, retire, introduced = part.ready, part.retire, introduced or part.number > 1
        name = name and f"{name}.{part.number}"
    with (
        _understudies(app, options, kind) as understudies,
        make_interruption(app, duplicate_window=anew.duplicate_window) as interruption,
        open_log(app, options.log_format, options.log_level, name=name) as journal,
    ):
        told = WorkerOptions(
            options.queues,
            options.burst,
            name,
            sidecar=next(iter(understudies.values()), None),
            reload=options.reload,
            log_writer=journal,
            processes=options.processes,
            restart_mode=anew,
            skips_startup_warnings=introduced,
            sidecars=understudies,
        )
        trio.run(partial(serve_in_process, kind=kind), app, told, interruption, ready, retire)
    if not anew.is_due or interruption.was_requested:
        return 0
    if anew.in_place:
        re_execute(anew.start_folder)
    return RESTART_EXIT_CODE


@contextmanager
def _understudies(
    app: App, options: ServeOptions, page: ProcessKind
) -> Generator[dict[str, Understudy], None, None]:
    """One for each broker that the process works on, by its name."""
    homes = worker.get_queues_by_broker(app, WorkerOptions(options.queues)) if page.has_sidecar else ()
    with ExitStack() as stack:
        yield {broker: stack.enter_context(start_sidecar(app, broker)) for broker in homes}


def make_interruption(app: App, *, duplicate_window: float = 0.0) -> Interruption:
    """What stops a process that serves `app`. When its parent has died, signals within `patience` seconds are one."""
    parent = os.getppid() if duplicate_window else 0
    return Interruption(
        limit=app.settings.grace_period + STOP_LIMIT, duplicate_window=duplicate_window, parent=parent
    )


async def serve_in_process(
    app: App,
    options: WorkerOptions,
    interruption: Interruption,
    on_ready: Callable[[], None] = lambda: None,
    on_retire: Callable[[], None] = lambda: None,
    *,
    kind: ProcessKind = WORKER,
    companions: Sequence[ProcessKind] = (),
) -> None:
    """Be one worker, or what `page` says, in this Trio run until a signal, a command, or until a burst is done. `told`
    is called when it consumes, `retiring` when it ends because it was commanded to: then nobody need replace it. What
    is `beside` it lives as long, and is there before it."""
    vitals = ProcessStatus(app=app.name)
    options = replace(
        options,
        incarnation=new_incarnation_name(options.name),
        process_status=vitals,
        on_stuck=interruption.start_deadline,
    )
    log = Log(worker=options.incarnation, app=app.name, writer=options.log_writer, kind=kind.name)
    done = trio.Event()
    _introduce(options, log)
    port = StatusPort(
        process_status=vitals,
        log=log,
        port=app.settings.status_port,
        host=app.settings.status_host,
        ports=options.processes,
    )
    try:
        async with trio.open_nursery() as around:  # probes are answered until the last job is settled
            await around.start(StackDump(log).run)
            await around.start(port.run)
            await around.start(_watch(app, vitals, port, log, own=not options.shares_process).run)
            async with trio.open_nursery() as nursery:
                interruption.on_stop(_asking(nursery.cancel_scope, log, vitals))
                interruption.on_reload(_ringing(options.reload_bell))

                def tell() -> None:
                    interruption.start_deadline()
                    if not options.burst and not options.restart_mode.is_due:
                        on_retire()

                nursery.start_soon(_stop_when, done, nursery.cancel_scope, vitals, tell)
                for each in companions:
                    await nursery.start(
                        partial(
                            run_companion,
                            each,
                            app,
                            options.log_writer,
                            tell,
                            reload_bell=options.reload_bell,
                        )
                    )
                ready = _Ready(log, on_ready, kind.name)
                await kind.run(app, options, log=log, done=done, task_status=ready)
            around.cancel_scope.cancel()
    except BaseException as error:
        log.event(f"{kind.name}:stopped")
        log.finish(error)
        raise
    log.event(f"{kind.name}:stopped")
    log.finish()


def _watch(app: App, process_status: ProcessStatus, port: StatusPort, log: Log, *, own: bool) -> LoopWatchdog:
    """Return what watches the event loop of this process. `own`: systemd hears of it from here."""
    address = read_notify_settings(os.environ, os.getpid())["address"] if own else None
    threshold = app.settings.loop_block_warning
    return LoopWatchdog(
        threshold=threshold, process_status=process_status, port=port, address=address, log=log
    )


async def run_companion(
    kind: ProcessKind,
    app: App,
    journal: LogWriter | None,
    on_stuck: Callable[[], None],
    *,
    reload_bell: ReloadSignal | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Be what `page` says until cancelled, in the process of another."""
    name = new_incarnation_name(f"{socket.gethostname()}:{os.getpid()}:{kind.name}")
    told = WorkerOptions(
        incarnation=name,
        log_writer=journal,
        on_stuck=on_stuck,
        shares_process=True,
        reload_bell=reload_bell or ReloadSignal(),
    )
    log = Log(worker=name, app=app.name, writer=journal, kind=kind.name)
    try:
        await kind.run(app, told, log=log, done=trio.Event(), task_status=task_status)
    finally:
        log.finish()


def _asking(
    scope: trio.CancelScope, log: Log, process_status: ProcessStatus
) -> Callable[[signal.Signals], None]:
    """What asks the worker in `scope` to stop; it may be called in a signal handler, and after the run."""
    token = trio.lowlevel.current_trio_token()

    def stop(number: signal.Signals) -> None:
        log.event(
            "process:stop-requested",
            signal=number.name,
            hint="finishing what runs; once more to exit at once",
        )
        process_status.mark_stopping()
        scope.cancel()

    def ask(number: signal.Signals) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(stop, number)

    return ask


def _ringing(bell: ReloadSignal) -> Callable[[], None]:
    """What rings the bell; it may be called in a signal handler, and after the run."""
    token = trio.lowlevel.current_trio_token()

    def ring() -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(bell.send)

    return ring


def _introduce(options: WorkerOptions, log: Log) -> None:
    """What there is to say at the start. Jobs are other people's code as often as not: not for root (C88)."""
    if options.sidecar is not None:
        log.event("sidecar:started", "debug", pid=options.sidecar.pid)
    if not options.skips_startup_warnings and os.geteuid() == 0:
        log.event("process:run-as-root", "warning", hint=_ROOT)


class _Ready(trio.TaskStatus[None]):
    """Says in the log that the worker consumes, and tells the collector that what is loaded by now stays."""

    def __init__(self, log: Log, told: Callable[[], None], word: str) -> None:
        self._log = log
        self._word = word
        self._told = told

    def started(self, value: None = None) -> None:
        gc.collect()
        gc.freeze()
        self._told()
        self._log.event(f"{self._word}:ready")


_ROOT = (
    "this runs as root, and so does every job: run it as a user of its own, by a systemd user unit, User= in a system "
    "unit, or USER in a container image"
)


def _nothing() -> None:
    """Nobody wants to know that this worker is ready."""


async def _stop_when(
    done: trio.Event, scope: trio.CancelScope, process_status: ProcessStatus, tell: Callable[[], None]
) -> None:
    await done.wait()
    process_status.mark_stopping()
    tell()
    scope.cancel()
