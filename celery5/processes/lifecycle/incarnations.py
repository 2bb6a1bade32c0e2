"""Incarnations: keeps one incarnation of a process after another alive.

A process that was taken for dead begins again under a new name; one whose configuration has changed does so with the
new settings. What an incarnation is built of stands on the page of its kind: worker.py, router.py and so on.
"""

import itertools
import os
import random
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
import trio

from celery5.app import App
from celery5.bootsteps.boot import BootFailed, BootGraph
from celery5.broker.topologies import ClusterFound, ServerFound, remember_clusters
from celery5.broker.transient_errors import is_key_corrupt, is_outage, is_transient
from celery5.errors import BrokerDenied, BrokerError, BrokerReplied, BrokerUnavailable, LeaseLost
from celery5.logs.log import Log
from celery5.protocol.job.job import new_id
from celery5.protocol.job.retry_policy import full_jitter
from celery5.services.health.vitals import ProcessStatus
from celery5.services.process.reloader import ConfigurationChanged, NextIncarnation


class ProcessKind(msgspec.Struct, frozen=True):
    """A kind of process."""

    # worker, router, scheduler, controller or publisher.
    name: str
    # Runs it until cancelled: see `celery5.processes.worker.run`.
    run: Callable[..., Awaitable[None]]
    # Checks before that whether the application can be served so. Raises Misconfigured.
    check: Callable[[App], None]
    # Whether a sidecar process stands by it.
    has_sidecar: bool = False


class ProcessEvents(msgspec.Struct, frozen=True):
    """The log events about a process of one kind: written out, so that a search finds them."""

    started: str
    reload_started: str
    restarted: str
    stopped: str


PROCESS_EVENTS: Mapping[str, ProcessEvents] = {
    "worker": ProcessEvents("worker:started", "worker:reload-started", "worker:restarted", "worker:stopped"),
    "router": ProcessEvents("router:started", "router:reload-started", "router:restarted", "router:stopped"),
    "scheduler": ProcessEvents(
        "scheduler:started", "scheduler:reload-started", "scheduler:restarted", "scheduler:stopped"
    ),
    "publisher": ProcessEvents(
        "publisher:started", "publisher:reload-started", "publisher:restarted", "publisher:stopped"
    ),
    "controller": ProcessEvents(
        "controller:started", "controller:reload-started", "controller:restarted", "controller:stopped"
    ),
}


class DegradedOperation(msgspec.Struct, frozen=True):
    """What a process of several brokers goes on with while its own broker cannot be reached."""

    # The name of its own broker.
    broker: str
    # Builds it, under this name; what it is given says when a whole incarnation follows.
    make_boot: Callable[[str, NextIncarnation], BootGraph]
    # Whether any other broker can be written to. If none can, there is nothing to go on with.
    reaches_another: Callable[[], Awaitable[bool]]


async def run_incarnations(
    kind: str,
    make_boot: Callable[[str, NextIncarnation], BootGraph],
    process_status: ProcessStatus,
    *,
    name: str,
    first_name: str,
    log: Log,
    wait_for_broker: bool = False,
    try_write: Callable[[], Awaitable[object]],
    task_status: trio.TaskStatus[None],
    on_unreachable: Callable[[Exception], None] | None = None,
    degraded: DegradedOperation | None = None,
) -> None:
    """Run one incarnation after the other until cancelled.

    Args:
        kind: The kind of process.
        make_boot: Builds an incarnation, by its name and with what announces the next one.
        process_status: What probes and metrics read.
        name: What the names of all incarnations begin with; "": host and process id.
        first_name: The whole name of the first one, if it is known already.
        log: The log of the process.
        wait_for_broker: Wait for the broker at the start, too.
        try_write: Writes something to the broker. While it takes no writes, no incarnation begins.
        task_status: Started when the first incarnation is up.
        on_unreachable: Called once when the broker is unreachable at the start, which is waited for then.
        degraded: What goes on between two incarnations while the broker is unreachable and another one is not. It
            counts as a start.

    Raises:
        BrokerError: The broker lets nobody in; or it is unreachable at the start, and nobody waits for it.
    """
    events = PROCESS_EVENTS[kind]
    status = _FirstStart(task_status, log, events)
    is_first = not wait_for_broker
    attempts, next_incarnation = itertools.count(), NextIncarnation()
    while True:
        # Never used twice: what a former incarnation held is for recovery, not for us.
        own_name, first_name = first_name or new_incarnation_name(name), ""
        log.set_worker(own_name)
        process_status.mark_starting(own_name)
        boot = make_boot(own_name, next_incarnation)
        failure, is_reloaded = await _run_once(boot, status, log)
        if is_reloaded:
            log.event(events.reload_started, name=own_name)
            attempts = itertools.count()
        outage = None
        if failure is not None:
            outage = await _Outage.find(failure, degraded)
            waits = on_unreachable is not None or outage.degraded is not None
            outage.raise_final(is_first=is_first, unreachable_reported=waits, has_started=status.is_started)
            log.event(events.restarted, "error", name=own_name, why=outage.reason, **outage.hint)
            process_status.mark_waiting(outage.reason if outage.is_refused or outage.degraded else "")
            if on_unreachable is not None and not status.is_started:
                on_unreachable(BrokerUnavailable(outage.reason))
                on_unreachable = _ignore
        next_incarnation.apply_settings()
        # The first incarnation must find the broker; one that lost it later waits, and does not ask too often.
        is_first = is_first and not (on_unreachable is None or status.is_started)
        if outage is not None and outage.degraded is not None:
            outage.log_degraded(log)
            await _run_degraded(outage.degraded, new_incarnation_name(name), try_write, status)
            # What is written to may not be all that an incarnation needs: it does not begin again at once each time.
            await _pause(next(attempts), None)
        else:
            await _pause(next(attempts), try_write if outage is not None and outage.is_refused else None)


async def _run_once(
    boot: BootGraph, status: "_FirstStart", log: Log
) -> "tuple[ExceptionGroup[Exception] | None, bool]":
    """Run an incarnation; return what ended it of the errors that may be survived, and whether it is to be reloaded.

    If its server is part of a cluster, the next incarnation is built for the cluster; and the other way round.
    """
    failure, is_reloaded = None, False
    try:
        await boot.run(task_status=status)
    except* ConfigurationChanged:
        is_reloaded = True
    except* ClusterFound as errors:
        remember_clusters(errors)
        found = next(_leaves(errors))
        if isinstance(found, ServerFound):
            log.event("redis:server-found", why=str(found))
        else:
            log.event("redis:cluster-found", why=str(found))
    except* _SURVIVABLE as errors:
        failure = errors
    return failure, is_reloaded


class _Outage(msgspec.Struct, frozen=True):
    """Why an incarnation has ended, when it was by the broker."""

    failure: ExceptionGroup[Exception]
    reason: str
    # Whether the broker answers, and takes no writes.
    is_refused: bool
    # Fields of the log message.
    hint: Mapping[str, str]
    # What goes on without it.
    degraded: DegradedOperation | None

    @classmethod
    async def find(cls, failure: ExceptionGroup[Exception], degraded: DegradedOperation | None) -> "_Outage":
        """Return what these errors say, and whether another broker is served."""
        leaves = list(_leaves(failure))
        if degraded is not None and not (any(map(is_outage, leaves)) and await degraded.reaches_another()):
            degraded = None
        hint = {"hint": _CORRUPT_KEY} if any(map(is_key_corrupt, leaves)) else {}
        return cls(failure, str(leaves[0]), any(map(_is_refused, leaves)), hint, degraded)

    def raise_final(self, *, is_first: bool, unreachable_reported: bool, has_started: bool) -> None:
        """Raise the errors that end the process, as a group, if there are any: `should_restart` decides."""
        final = self.failure.split(
            lambda error: should_restart(
                error,
                is_first=is_first and not has_started,
                unreachable_reported=unreachable_reported,
                has_started=has_started,
            )
        )[1]
        if final is not None:
            raise final from None

    def log_degraded(self, log: Log) -> None:
        """Log that other brokers are served."""
        assert self.degraded is not None
        broker = self.degraded.broker
        log.event("broker:connect-failed", "warning", broker=broker, why=self.reason, hint=_OTHERS_SERVED)


async def _run_degraded(
    degraded: DegradedOperation,
    name: str,
    try_write: Callable[[], Awaitable[object]],
    status: "_FirstStart",
) -> None:
    """Run what goes on without the broker until that can be written to."""
    next_incarnation = NextIncarnation()
    boot = degraded.make_boot(name, next_incarnation)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(boot.run, task_status=_DegradedStart(status)))
            await _wait_for_writes(try_write, waits_out=is_outage, interval=DEGRADED_INTERVAL)
            next_incarnation.request(_nothing)  # so nobody is told that the process ends
            nursery.cancel_scope.cancel()
    except* _SURVIVABLE:
        await trio.sleep(DEGRADED_INTERVAL)  # the next incarnation meets the broker as it is


DEGRADED_INTERVAL = 1.0
"""Seconds between two attempts to reach the broker while the others are served."""
WRITE_INTERVAL = 0.5
"""Seconds between two attempts to write to a broker that takes no writes. An incarnation that begins makes connections
and logs, and needs many calls until it is refused, too."""


def _is_refused(error: Exception) -> bool:
    """Return whether the broker answers, and takes no writes: its memory is full, say."""
    return isinstance(error, BrokerReplied) and is_outage(error)


async def _pause(attempt: int, try_write: Callable[[], Awaitable[object]] | None) -> None:
    """Wait before the next incarnation: longer after each attempt, and until `try_write` succeeds, if it is given."""
    await trio.sleep(full_jitter(attempt, start=0.1, cap=1.0, random=random.random) if attempt else 0)
    if try_write is not None:
        await _wait_for_writes(try_write, waits_out=_is_refused, interval=WRITE_INTERVAL)


async def _wait_for_writes(
    try_write: Callable[[], Awaitable[object]],
    *,
    waits_out: Callable[[BrokerError], bool],
    interval: float,
) -> None:
    """Wait until the broker takes writes again, or fails with an error other than those that are waited out: that is
    for the next incarnation to meet."""
    while True:
        try:
            await try_write()
        except BrokerError as error:
            if not waits_out(error):
                return
            await trio.sleep(interval)
        else:
            return


_SURVIVABLE = (LeaseLost, BootFailed, BrokerUnavailable, BrokerReplied, BrokerDenied)
"""The errors that a process may survive by beginning again: `should_restart` decides for each."""


def should_restart(
    error: BaseException, *, is_first: bool, unreachable_reported: bool, has_started: bool = False
) -> bool:
    """Return whether a process begins again after this error of an incarnation, instead of ending.

    A process that begins again waits for the same errors as a running one: a broker that cannot be reached, or that
    refuses writes for a while (`celery5.services.process.broker_outages`).

    Args:
        error: One error, or a group of them, which is never decided as a whole.
        is_first: No incarnation has been up or has ended yet. Then only a lost lease and a corrupt key are survived, so
            that a mistake in the configuration ends the process with one clear line.
        unreachable_reported: The process serves several brokers, so one that is unreachable at first has been reported
            and is waited for.
        has_started: An incarnation has been up. A permission that is missing since then was taken from the user, and
            may be given back.
    """
    match error:
        case BrokerDenied() if has_started:
            return True
        case LeaseLost():
            return True
        case BootFailed():
            return not is_first
        case BrokerReplied() if is_key_corrupt(error):
            return True  # Redis works: when the key is repaired, no process needs a restart
        case _:
            return (unreachable_reported or not is_first) and is_transient(error)


class _FirstStart(trio.TaskStatus[None]):
    """Starts the process when its first incarnation is up; when later ones are, that is logged."""

    def __init__(self, status: trio.TaskStatus[None], log: Log, events: ProcessEvents) -> None:
        self._status = status
        self._log = log
        self._events = events
        self.is_started = False

    def started(self, value: None = None) -> None:
        if self.is_started:
            self._log.event(self._events.started)
        else:
            self.is_started = True
            self._status.started()


class _DegradedStart(trio.TaskStatus[None]):
    """Starts the process when what goes on without its broker is up."""

    def __init__(self, status: _FirstStart) -> None:
        self._status = status

    def started(self, value: None = None) -> None:
        if not self._status.is_started:
            self._status.started()


def _nothing() -> None:
    """The settings stay as they are."""


def _ignore(_error: Exception) -> None:
    """It was reported already."""


def _leaves(group: Any) -> Iterator[Exception]:
    """Yield the errors in a group of groups."""
    for exception in group.exceptions:
        if isinstance(exception, BaseExceptionGroup):
            yield from _leaves(exception)
        else:
            yield exception


_OTHERS_SERVED = "the others are served meanwhile"
_CORRUPT_KEY = (
    "another program has written to a key of this application: repair or delete the key; it is tried again"
)


def new_incarnation_name(name: str = "") -> str:
    """Return a name that no incarnation has had: `name`, else host and process id, and a random part."""
    return f"{name or f'{socket.gethostname()}:{os.getpid()}'}:{new_id()[:6]}"
