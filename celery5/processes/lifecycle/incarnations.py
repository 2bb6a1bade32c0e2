"""Lives: keeps one incarnation of a process after another alive.

A process that was taken for dead begins again under a new name; one whose configuration has changed does so with the
new settings. What an incarnation is made of is its own page's business: worker.py, router.py.
"""

import itertools
import os
import random
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import trio

from celery5.app import App
from celery5.bootsteps.boot import BootFailed, BootGraph
from celery5.errors import BrokerReplied, BrokerUnavailable, LeaseLost
from celery5.logs.log import Log
from celery5.protocol.job.job import new_id
from celery5.protocol.job.retry_policy import full_jitter
from celery5.services.health.vitals import ProcessStatus
from celery5.services.process.broker_outages import is_key_corrupt, is_transient
from celery5.services.process.reloader import ConfigurationChanged, NextIncarnation


@dataclass(frozen=True, slots=True)
class ProcessKind:
    """A kind of process: the `word` for it, how it is `run` until cancelled (see `celery5.processes.worker.run`), what
    `check`s before that whether the application can be served so, and whether an `understudy` stands by."""

    name: str
    run: Callable[..., Awaitable[None]]
    check: Callable[[App], None]
    has_sidecar: bool = False


async def run_incarnations(
    kind: str,
    make_boot: Callable[[str, NextIncarnation], BootGraph],
    process_status: ProcessStatus,
    *,
    name: str,
    first_name: str,
    log: Log,
    wait_for_broker: bool = False,
    task_status: trio.TaskStatus[None],
    on_unreachable: Callable[[Exception], None] | None = None,
) -> None:
    """Live until cancelled. `boot_of` puts an incarnation together, given its own name, which begins with `name`; the
    `first` one may be known already. `word` is what the log calls it: worker, router. Raises BrokerError when Redis
    lets nobody in, and, unless it is `patient`, when it is away at first or refuses; with `missed` that is told there,
    once, and waited for."""
    status = _Once(task_status, log, kind)
    at_first = not wait_for_broker
    lives, next_incarnation = itertools.count(), NextIncarnation()
    while True:
        # Never used twice: what a former incarnation held is for recovery, not for us.
        own, first_name = first_name or new_incarnation_name(name), ""
        log.set_worker(own)
        process_status.mark_starting(own)
        boot = make_boot(own, next_incarnation)
        try:
            await boot.run(task_status=status)
        except* ConfigurationChanged:
            log.event(f"{kind}:reloading", name=own)
            lives = itertools.count()
        except* _SURVIVABLE as ended:
            final = _final(ended, at_first=at_first, told_away=on_unreachable is not None)
            if final is not None:
                raise final from None
            hint = {"hint": _SPOILT} if any(map(is_key_corrupt, _leaves(ended))) else {}
            log.event(f"{kind}:again", "error", name=own, why=_first_of(ended), **hint)
            if on_unreachable is not None and not status.said:
                on_unreachable(BrokerUnavailable(_first_of(ended)))
                on_unreachable = _nobody
        next_incarnation.apply_settings()
        # The first life must find Redis; whoever lost it later waits for it, and does not ask too often.
        at_first = at_first and not (on_unreachable is None or status.said)
        life = next(lives)
        await trio.sleep(full_jitter(life, start=0.1, cap=1.0, random=random.random) if life else 0)


_SURVIVABLE = (LeaseLost, BootFailed, BrokerUnavailable, BrokerReplied)
"""The errors that a process may survive by beginning again: `begins_again` decides for each."""


def should_restart(error: BaseException, *, is_first: bool, unreachable_reported: bool) -> bool:
    """Return whether a process begins again after this error of an incarnation, instead of ending.

    A process that begins again waits for the same errors as a running one: a broker that cannot be reached, or that
    refuses writes for a while (`celery5.services.process.broker_outages`).

    Args:
        error: One error, or a group of them, which is never decided as a whole.
        at_first: No incarnation has ended yet. Then only a lost lease and a spoilt key are survived, so that a
            mistake in the configuration ends the process with one clear line.
        told_away: The process serves several brokers, so one that is away at first has been reported and is waited for.
    """
    match error:
        case LeaseLost():
            return True
        case BootFailed():
            return not is_first
        case BrokerReplied() if is_key_corrupt(error):
            return True  # Redis works: when the key is repaired, no process needs a restart
        case _:
            return (unreachable_reported or not is_first) and is_transient(error)


def _final(
    group: ExceptionGroup[Exception], *, at_first: bool, told_away: bool
) -> ExceptionGroup[Exception] | None:
    """Return the errors of a group that end the process, as a group; None when there are none."""

    def survived(error: BaseException) -> bool:
        return should_restart(error, is_first=at_first, unreachable_reported=told_away)

    return group.split(survived)[1]


class _Once(trio.TaskStatus[None]):
    """Says that the process is up, when its first incarnation is that comes up at all. Of later ones the log tells."""

    def __init__(self, status: trio.TaskStatus[None], log: Log, word: str) -> None:
        self._status = status
        self._log = log
        self._word = word
        self.said = False

    def started(self, value: None = None) -> None:
        if self.said:
            self._log.event(f"{self._word}:ready")
        else:
            self.said = True
            self._status.started()


def _nobody(_error: Exception) -> None:
    """It was told already."""


def _first_of(group: Any) -> str:
    """The first error in a group of groups, as text."""
    first = group.exceptions[0]
    inner = getattr(first, "exceptions", None)  # a group in the group
    return str(first) if inner is None else _first_of(first)


def _leaves(group: Any) -> Iterator[Exception]:
    """Yield the errors in a group of groups."""
    for each in group.exceptions:
        if isinstance(each, BaseExceptionGroup):
            yield from _leaves(each)
        else:
            yield each


_SPOILT = (
    "another program has written to a key of this application: repair or delete the key; it is tried again"
)


def new_incarnation_name(name: str = "") -> str:
    """A name that no incarnation has had: `name`, else host and process, and a new word."""
    return f"{name or f'{socket.gethostname()}:{os.getpid()}'}:{new_id()[:6]}"
