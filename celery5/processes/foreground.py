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
from celery5.log import Format, Journal, Level, Log
from celery5.processes import fleet, worker
from celery5.processes.again import begin_again, begins
from celery5.processes.fence import pass_fence
from celery5.processes.lives import Page, new_name
from celery5.processes.loop_watch import LoopWatch
from celery5.processes.own_log import own_log
from celery5.processes.signals import Interruption
from celery5.processes.stacks import Stacks
from celery5.processes.understudy import Understudy, standing_by
from celery5.processes.worker import WorkerOptions
from celery5.protocol.recycling import RECYCLED
from celery5.services.reloader import Bell
from celery5.services.status_port import StatusPort
from celery5.services.systemd_notify import from_environment
from celery5.services.vitals import Vitals

STOP_LIMIT = 40.0
"""Seconds beyond the grace period after which a process that was told to stop is ended. The parent of several has more
patience, and systemd more again."""
WORKER = Page("worker", worker.run, worker.check, understudy=True)
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


def serve(app: App, options: ServeOptions, page: Page = WORKER) -> int:
    """Serve until stopped, as what `page` says; gives the exit code: 0 when all ended as it was asked to,
    RECYCLED when whoever has started it is to start the next one. Without such a one it begins again itself.

    Raises BrokerError when Redis cannot be reached at the start or lets nobody in.
    """
    ready, retire, name = _nothing, _nothing, options.name
    anew = begins(os.environ, processes=options.processes)
    page.check(app)
    introduced = pass_fence(app, without_redis=page.word == "publisher")
    if options.processes > 1:
        part = fleet.supervise(app, processes=options.processes, burst=options.burst, word=page.word)
        if isinstance(part, int):
            return part
        ready, retire, introduced = part.ready, part.retire, introduced or part.number > 1
        name = name and f"{name}.{part.number}"
    with (
        _understudies(app, options, page) as understudies,
        stopping(app, patience=anew.patience) as interruption,
        own_log(app, options.log_format, options.log_level, name=name) as journal,
    ):
        told = WorkerOptions(
            options.queues,
            options.burst,
            name,
            understudy=next(iter(understudies.values()), None),
            reload=options.reload,
            journal=journal,
            processes=options.processes,
            anew=anew,
            introduced=introduced,
            understudies=understudies,
        )
        trio.run(partial(serve_here, page=page), app, told, interruption, ready, retire)
    if not anew.due or interruption.came:
        return 0
    if anew.in_place:
        begin_again(anew.folder)
    return RECYCLED


@contextmanager
def _understudies(
    app: App, options: ServeOptions, page: Page
) -> Generator[dict[str, Understudy], None, None]:
    """One for each broker that the process works on, by its name."""
    homes = worker.brokers_of(app, WorkerOptions(options.queues)) if page.understudy else ()
    with ExitStack() as stack:
        yield {broker: stack.enter_context(standing_by(app, broker)) for broker in homes}


def stopping(app: App, *, patience: float = 0.0) -> Interruption:
    """What stops a process that serves `app`. When its parent has died, signals within `patience` seconds are one."""
    parent = os.getppid() if patience else 0
    return Interruption(limit=app.settings.grace_period + STOP_LIMIT, patience=patience, parent=parent)


async def serve_here(
    app: App,
    options: WorkerOptions,
    interruption: Interruption,
    told: Callable[[], None] = lambda: None,
    retiring: Callable[[], None] = lambda: None,
    *,
    page: Page = WORKER,
    beside: Sequence[Page] = (),
) -> None:
    """Be one worker, or what `page` says, in this Trio run until a signal, a command, or until a burst is done. `told`
    is called when it consumes, `retiring` when it ends because it was commanded to: then nobody need replace it. What
    is `beside` it lives as long, and is there before it."""
    vitals = Vitals(app=app.name)
    options = replace(options, incarnation=new_name(options.name), vitals=vitals, stuck=interruption.must_end)
    log = Log(worker=options.incarnation, app=app.name, journal=options.journal, kind=page.word)
    done = trio.Event()
    _introduce(options, log)
    port = StatusPort(
        vitals=vitals,
        log=log,
        port=app.settings.status_port,
        host=app.settings.status_host,
        ports=options.processes,
    )
    try:
        async with trio.open_nursery() as around:  # probes are answered until the last job is settled
            await around.start(Stacks(log).run)
            await around.start(port.run)
            await around.start(_watch(app, vitals, port, log, own=not options.beside).run)
            async with trio.open_nursery() as nursery:
                interruption.ends(_asking(nursery.cancel_scope, log, vitals))
                interruption.reloads(_ringing(options.bell))

                def tell() -> None:
                    interruption.must_end()
                    if not options.burst and not options.anew.due:
                        retiring()

                nursery.start_soon(_stop_when, done, nursery.cancel_scope, vitals, tell)
                for each in beside:
                    await nursery.start(
                        partial(run_beside, each, app, options.journal, tell, bell=options.bell)
                    )
                ready = _Ready(log, told, page.word)
                await page.run(app, options, log=log, done=done, task_status=ready)
            around.cancel_scope.cancel()
    except BaseException as error:
        log.event(f"{page.word}:stopped")
        log.finish(error)
        raise
    log.event(f"{page.word}:stopped")
    log.finish()


def _watch(app: App, vitals: Vitals, port: StatusPort, log: Log, *, own: bool) -> LoopWatch:
    """Return what watches the event loop of this process. `own`: systemd hears of it from here."""
    address = from_environment(os.environ, os.getpid())["address"] if own else None
    threshold = app.settings.loop_block_warning
    return LoopWatch(threshold=threshold, vitals=vitals, port=port, address=address, log=log)


async def run_beside(
    page: Page,
    app: App,
    journal: Journal | None,
    stuck: Callable[[], None],
    *,
    bell: Bell | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Be what `page` says until cancelled, in the process of another."""
    name = new_name(f"{socket.gethostname()}:{os.getpid()}:{page.word}")
    told = WorkerOptions(incarnation=name, journal=journal, stuck=stuck, beside=True, bell=bell or Bell())
    log = Log(worker=name, app=app.name, journal=journal, kind=page.word)
    try:
        await page.run(app, told, log=log, done=trio.Event(), task_status=task_status)
    finally:
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


def _ringing(bell: Bell) -> Callable[[], None]:
    """What rings the bell; it may be called in a signal handler, and after the run."""
    token = trio.lowlevel.current_trio_token()

    def ring() -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(bell.ring)

    return ring


def _introduce(options: WorkerOptions, log: Log) -> None:
    """What there is to say at the start. Jobs are other people's code as often as not: not for root (C88)."""
    if options.understudy is not None:
        log.event("worker:understudy", "debug", pid=options.understudy.pid)
    if not options.introduced and os.geteuid() == 0:
        log.event("process:root", "warning", hint=_ROOT)


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
    done: trio.Event, scope: trio.CancelScope, vitals: Vitals, tell: Callable[[], None]
) -> None:
    await done.wait()
    vitals.stopping()
    tell()
    scope.cancel()
