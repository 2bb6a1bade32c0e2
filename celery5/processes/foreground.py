"""Serve one application in the foreground, as one process or several, until stopped. A worker is the default."""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import trio
from msgspec.structs import replace

from celery5.app import App
from celery5.bootsteps.boot import BootFailed
from celery5.broker.calls import cluster
from celery5.errors import BrokerReplied, BrokerUnavailable, CeleryError, LeaseLost, Misconfigured, Superseded
from celery5.logs.log import Log
from celery5.processes import router, scheduler, worker
from celery5.processes.lifecycle import fleet
from celery5.processes.lifecycle.companions import log_failure, run_companion
from celery5.processes.lifecycle.incarnations import PROCESS_EVENTS, ProcessKind, new_incarnation_name
from celery5.processes.lifecycle.loaded_code import find_code_file
from celery5.processes.lifecycle.signals import Interruption
from celery5.processes.options import ProcessOptions
from celery5.processes.process_log import open_log
from celery5.processes.watch.event_loop import LoopWatchdog
from celery5.processes.watch.freeze import StopTimes
from celery5.processes.watch.sidecar import start_sidecars
from celery5.processes.watch.stacks import StackDump
from celery5.processes.worker import WorkerOptions
from celery5.protocol.cluster.canary_limit import parse_bounds
from celery5.protocol.cluster.leadership import EPOCH_VARIABLE, is_superseded
from celery5.protocol.masking import escape_text
from celery5.protocol.process.recycling import (
    IS_SPARE,
    RESTART_EXIT_CODE,
    STARTS_SUCCESSOR,
    SUPERVISED_VARIABLE,
)
from celery5.runners.context import LOG_EVENT
from celery5.services.health.status_port import CountWorkers, ReadWanted, StatusPort
from celery5.services.health.vitals import ProcessStatus
from celery5.services.process.fenced import keep_running, run_fenced
from celery5.services.process.reloader import ReloadSignal
from celery5.services.process.systemd_notify import notify, notify_watchdog, read_notify_settings
from celery5.services.worker.recycling import RestartMode


def check(app: App) -> None:
    """Check an application as each process would do at its start. Raises Misconfigured."""
    worker.check(app)
    if router.is_needed(app):
        router.check(app)
    if scheduler.is_needed(app):
        scheduler.check(app)


def check_controller_epoch(app: App, *, without_redis: bool = False) -> bool:
    """Whether a Controller has started this process. Raises Superseded when another one leads by now; BrokerUnavailable
    when nobody knows, unless it may begin `without_redis`.

    The variable is for this process alone: what a job starts is no affair of the Controller's.
    """
    epoch = os.environ.pop(EPOCH_VARIABLE, "")
    if not epoch:
        return False
    if not (epoch.isascii() and epoch.isdigit()):
        raise Misconfigured(
            f"{EPOCH_VARIABLE} is {epoch!r}: it is a number, which a Controller gives what it starts"
        )
    try:
        record = app.perform(cluster.get_leader(app.keys))
    except BrokerUnavailable:
        if not without_redis:
            raise
    else:
        if is_superseded(int(epoch), record):
            leader = f"{record.leader} leads" if record.leader else "another one led"
            raise Superseded(
                f"the Controller that started this process leads no more ({leader} in epoch {record.epoch}, "
                f"this is of {epoch}): it does not begin"
            )
    finally:
        app.close()  # processes are forked from here on
    return True


RESTART_FOLDER_VARIABLE = "CELERY5_BEGUN_AGAIN"
"""Set for a program that replaces itself: the folder in which it was first started."""

ORPHAN_GRACE = 2.0
"""Seconds within which a member takes several signals for one, when its Controller has died.

The kernel sends the signal of the parent's death once for each thread of the parent, as these end one after the other.
A second SIGTERM would otherwise mean to stop at once."""


def get_restart_mode(environ: MutableMapping[str, str], *, processes: int) -> RestartMode:
    """Return how this process was started, and how it restarts itself.

    It restarts in place, unless it is one of several `processes` under one parent, or a Controller has started it. The
    variables about that are removed from `environ`.
    """
    folder = environ.pop(RESTART_FOLDER_VARIABLE, "")
    supervision = environ.pop(SUPERVISED_VARIABLE, "")
    supervised = bool(supervision)
    is_alone = processes == 1 and not supervised
    return RestartMode(
        is_requested=True,
        in_place=is_alone,
        is_restarted=bool(folder),
        start_folder=folder or os.getcwd(),
        duplicate_window=ORPHAN_GRACE if supervised else 0.0,
        asks_controller=supervision in (STARTS_SUCCESSOR, IS_SPARE),
        is_spare=supervision == IS_SPARE,
    )


def re_execute(folder: str) -> None:
    """Replace this process by a new run of its program, started in `folder`, after its exit handlers have run.

    No thread that matters and no signal handler may be left. Returns only when the program cannot be executed.
    """
    # systemd must wait for the new run.
    notify(read_notify_settings(os.environ, os.getpid())["address"], "WATCHDOG=1")
    exits: Any = atexit
    exits._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.chdir(folder)  # a job may have left it
        os.execve(
            sys.executable,
            [sys.executable, *sys.orig_argv[1:]],
            {**os.environ, RESTART_FOLDER_VARIABLE: folder},
        )
    except OSError as error:
        sys.stderr.write(f"this worker cannot restart itself: {escape_text(str(error))}; start it again\n")


STOP_LIMIT = 40.0
"""Seconds after the grace period until a process that must stop is ended.

The parent of several processes waits longer, and systemd longer still."""
SIDECAR_MARGIN = 2.0
"""Seconds later at which a sidecar ends a process that cannot end itself."""
WORKER = ProcessKind("worker", worker.run, worker.check, has_sidecar=True)
"""The kind of process that runs jobs."""


class ServeOptions(msgspec.Struct, frozen=True):
    """How an application is served."""

    queues: tuple[str, ...] = ()  # the queues to consume; empty: all that the tasks name
    processors: tuple[str, ...] | None = None  # the processors of streams to run; None: all
    burst: bool = False  # whether to end when there are no more jobs
    name: str = ""  # the name of the process; "": made of host and process id
    processes: int = 1  # how many processes one parent keeps
    reload: bool = True  # whether a change of the configuration takes effect without a restart


def serve(app: App, options: ServeOptions, kind: ProcessKind = WORKER) -> int:
    """Serve an application until stopped, as one kind of process.

    Returns:
        The exit code: 0 when all stopped in order, RESTART_EXIT_CODE when the parent must start the next process.
        Without a parent it restarts itself.

    Raises:
        BrokerError: The broker cannot be reached at the start, or refuses the credentials.
    """
    ready, retire, name, number = _nothing, _nothing, options.name, 1
    restart_mode = get_restart_mode(os.environ, processes=options.processes)
    kind.check(app)
    introduced = check_controller_epoch(app, without_redis=kind.name == "publisher")
    if options.processes > 1:
        part = fleet.supervise(app, processes=options.processes, burst=options.burst, kind=kind.name)
        if isinstance(part, int):
            return part
        ready, retire, introduced = part.ready, part.retire, introduced or part.number > 1
        name, number = name and f"{name}.{part.number}", part.number
        restart_mode.set_successor(part.successor)
    with (
        start_sidecars(
            app, _list_brokers(app, options, kind), make_stop_times(app, restart_mode)
        ) as sidecars,
        make_interruption(app, duplicate_window=restart_mode.duplicate_window) as interruption,
        sidecars.watching(interruption),
        open_log(app, name=name) as journal,
    ):
        process_options = WorkerOptions(
            queues=options.queues,
            processors=options.processors,
            burst=options.burst,
            name=name,
            reload=options.reload,
            log_writer=journal,
            processes=options.processes,
            number=number,
            restart_mode=restart_mode,
            canary=parse_bounds(os.environ),
            skips_startup_warnings=introduced,
            sidecars=sidecars.by_broker,
        )
        trio.run(
            partial(serve_in_process, kind=kind),
            app,
            process_options,
            interruption,
            ready,
            _nothing if options.burst else retire,
        )
    if not restart_mode.is_due or interruption.was_requested:
        return 0
    if restart_mode.in_place:
        re_execute(restart_mode.start_folder)
    return RESTART_EXIT_CODE


def _list_brokers(app: App, options: ServeOptions, kind: ProcessKind) -> tuple[str, ...]:
    """Return the names of the brokers for each of which a sidecar stands by."""
    return (
        tuple(worker.get_queues_by_broker(app, WorkerOptions(queues=options.queues)))
        if kind.has_sidecar
        else ()
    )


def make_stop_times(app: App, restart_mode: RestartMode | None = None) -> StopTimes:
    """Return how long a process may take to stop before its sidecar ends it: longer than it takes to end itself."""
    window = 0.0 if restart_mode is None else restart_mode.duplicate_window
    return StopTimes(app.settings.grace_period + STOP_LIMIT + SIDECAR_MARGIN, window)


def make_interruption(app: App, *, duplicate_window: float = 0.0) -> Interruption:
    """Return what stops a process that serves `app`.

    When its parent has died, signals within `duplicate_window` seconds count as one.
    """
    parent = os.getppid() if duplicate_window else 0
    return Interruption(
        limit=app.settings.grace_period + STOP_LIMIT, duplicate_window=duplicate_window, parent=parent
    )


async def serve_in_process(
    app: App,
    options: ProcessOptions,
    interruption: Interruption,
    on_ready: Callable[[], None] = lambda: None,
    on_retire: Callable[[], None] = lambda: None,
    *,
    kind: ProcessKind = WORKER,
    companions: Sequence[ProcessKind] = (),
) -> None:
    """Run one process in this Trio run until a signal or a command ends it, or a burst is over.

    Args:
        app: The application.
        options: How it runs.
        interruption: What signals ask for.
        on_ready: Called when it works.
        on_retire: Called when it ends by itself: nobody need replace it.
        kind: What it is.
        companions: What runs beside it as long, and is up before it.
    """
    vitals = ProcessStatus(app=app.name)
    options = replace(
        options,
        incarnation=new_incarnation_name(options.name),
        process_status=vitals,
        on_stuck=interruption.start_deadline,
    )
    log = Log(worker=options.incarnation, app=app.name, writer=options.log_writer, kind=kind.name)
    done = trio.Event()
    LOG_EVENT.set(log.event)
    _introduce(options, log)
    port = StatusPort(
        process_status=vitals,
        log=log,
        port=app.settings.status_port,
        host=app.settings.status_host,
        ports=options.processes,
        read_cluster=lambda: app.metrics.atotals(),  # what reads metrics is loaded when somebody asks
        read_wanted=make_wanted_reader(app),
    )
    try:
        async with trio.open_nursery() as around:  # probes are answered until the last job is settled
            await around.start(run_fenced, "stacks", StackDump(log))
            await around.start(partial(keep_running, port.run, on_failure=log_failure(log, "status port")))
            watchdog = _watch(app, vitals, port, log, own=not options.shares_process)
            await around.start(run_fenced, "loop", watchdog)
            ready = _Ready(log, on_ready, kind.name, find_code_file(app))
            systemd = read_notify_settings({} if options.shares_process else os.environ, os.getpid())
            around.start_soon(notify_watchdog, systemd, ready.event)
            work = partial(kind.run, app, options, log=log, done=done, task_status=ready)
            await _run_until_stopped(
                app, options, vitals, interruption, log, done, on_retire, companions, work
            )
            around.cancel_scope.cancel()
    except BaseException as error:
        log.event(PROCESS_EVENTS[kind.name].stopped)
        log.finish(error)
        raise
    log.event(PROCESS_EVENTS[kind.name].stopped)
    log.finish()


async def _run_until_stopped(
    app: App,
    options: ProcessOptions,
    status: ProcessStatus,
    interruption: Interruption,
    log: Log,
    done: trio.Event,
    on_retire: Callable[[], None],
    companions: Sequence[ProcessKind],
    work: Callable[[], Awaitable[None]],
) -> None:
    """Run `work`, and its companions beside it, until a signal stops them or `done` is set."""
    async with trio.open_nursery() as nursery:
        interruption.on_stop(_asking(nursery.cancel_scope, log, status))
        interruption.on_reload(_make_reloader(options.reload_signal))

        def retire() -> None:
            interruption.start_deadline()
            if not options.restart_mode.is_due:
                on_retire()

        nursery.start_soon(_stop_when, done, nursery.cancel_scope, status, retire)
        for companion in companions:
            signal = options.reload_signal
            await nursery.start(
                partial(run_companion, companion, app, options.log_writer, retire, reload_signal=signal)
            )
        try:
            await work()
        except* _LOST_BROKER as errors:
            # Who was told to stop has stopped: what the broker did after that is no failure of the process.
            if not (interruption.was_requested or done.is_set()):
                raise
            log.event("process:stop-interrupted", "warning", why=_format_errors(errors))


_LOST_BROKER = (BrokerUnavailable, BrokerReplied, BootFailed, LeaseLost)
"""Errors of a broker that is lost, or refuses, while a process stops."""


def _format_errors(errors: BaseExceptionGroup[Exception]) -> str:
    """Return the errors in a group of groups as text."""
    found: list[str] = []
    for exception in errors.exceptions:
        found += (
            [_format_errors(exception)] if isinstance(exception, BaseExceptionGroup) else [str(exception)]
        )
    return "; ".join(dict.fromkeys(found))[:1000]


def _watch(app: App, process_status: ProcessStatus, port: StatusPort, log: Log, *, own: bool) -> LoopWatchdog:
    """Return what watches the event loop of this process. `own`: systemd hears of it from here."""
    address = read_notify_settings(os.environ, os.getpid())["address"] if own else None
    threshold = app.settings.loop_block_warning
    return LoopWatchdog(
        threshold=threshold, process_status=process_status, port=port, address=address, log=log
    )


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


def _make_reloader(bell: ReloadSignal) -> Callable[[], None]:
    """What rings the bell; it may be called in a signal handler, and after the run."""
    token = trio.lowlevel.current_trio_token()

    def ring() -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(bell.send)

    return ring


def _introduce(options: ProcessOptions, log: Log) -> None:
    """Log what is logged at the start. Jobs are other people's code as often as not: not for root."""
    if not options.skips_startup_warnings and os.geteuid() == 0:
        log.event("process:run-as-root", "warning", hint=_ROOT)


class _Ready(trio.TaskStatus[None]):
    """Logs that the process works, and exempts what is loaded by now from garbage collection."""

    def __init__(self, log: Log, on_ready: Callable[[], None], kind: str, code: str) -> None:
        self._log = log
        self._kind = kind
        self._code = code
        self._on_ready = on_ready
        self.event = trio.Event()

    def started(self, value: None = None) -> None:
        self.event.set()
        gc.collect()
        gc.freeze()
        self._on_ready()
        self._log.event(PROCESS_EVENTS[self._kind].started, code=self._code)


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


def make_wanted_reader(app: App) -> ReadWanted:
    """Return what reads how many workers there should be, by the last decision of a Scheduler."""

    async def read() -> CountWorkers:
        # Loaded when somebody asks.
        from celery5.broker.calls.jobs import SERVER_TIME
        from celery5.broker.calls.scaling import get_scaling
        from celery5.protocol.scaling.wanted_workers import MAX_AGE, count_wanted_workers

        scaling = await app.aperform(get_scaling(app.keys))
        now = await app.aperform(SERVER_TIME)
        if scaling is None or scaling.course is None or now - scaling.at > MAX_AGE:
            raise CeleryError(
                "nothing is scaled: it takes the setting autoscale, and a Scheduler: celery5 scheduler start"
            )
        decided, demands = scaling.course.workers, scaling.demands
        return lambda queues: count_wanted_workers(demands, queues) if queues else decided

    return read
