"""A clock that stands still until a test lets time pass, for jobs, runs and schedules on a real server.

The scripts and the worker are those of production. Only the time by which they keep jobs and runs is set here: on the
server, and in this process. A worker's lease and the timeouts of connections go by real time.
"""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from celery5.app import App
from celery5.broker.calls import queues as queue_calls
from celery5.broker.calls import scheduling as scheduling_calls
from celery5.broker.calls import virtual_time as calls
from celery5.broker.calls.health import scan_keys
from celery5.broker.calls.jobs import SERVER_TIME
from celery5.broker.calls.virtual_time import RemainingWork
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import EVENTS, QueueKeys
from celery5.broker.wall_clock import WALL_CLOCK
from celery5.errors import CeleryError, Misconfigured
from celery5.protocol.job.messages import read_command
from celery5.testing.rate_waits import RateWaits

STEP_LIMIT = 30.0
"""Real seconds that what is due at one time may take."""
LOOK_INTERVAL = 0.002
"""Real seconds between two looks at what is left."""
WAKE_INTERVAL = 0.05
"""Real seconds after which the worker is woken again, in case it missed it: its connection may be new."""
MOST_SECONDS = 1e11
"""Some 3,000 years: what is more has no date, and Redis no time to live for it."""
MAX_STEPS = 10_000
"""The most times at which something falls due in one `advance`."""
PAGE = 500


class VirtualClock:
    """The time by which jobs, runs and schedules of an application go while `virtual_time` lasts."""

    def __init__(
        self, app: App, redis: BlockingRedis, now: int, pause: Callable[[float], object] = time.sleep
    ) -> None:
        self._app = app
        self._redis = redis
        self._now = now
        self._pause = pause
        self._rates = RateWaits(app, redis)

    @property
    def now(self) -> float:
        """The virtual time in seconds since 1970."""
        return self._now / 1000

    def advance(self, seconds: float, *, with_schedules: bool = True) -> None:
        """Let time pass, and everything happen in its time: one after another, as it falls due.

        Before each step in time, and at the end, everything that can happen has happened: it ends like
        `wait_until_idle`.

        Args:
            seconds: How many, from 0 on.
            with_schedules: Whether there is a Scheduler, which makes schedules fire.

        Raises:
            ValueError: It is negative, no number, or more than MOST_SECONDS.
            TimeoutError: What is due at one time has not ended within 30 real seconds. The error names it.
        """
        _check_seconds("advance", seconds)
        end = self._now + round(seconds * 1000)
        for _ in range(MAX_STEPS):
            next_due = self._wait_until_idle(with_schedules=with_schedules).next_due
            if next_due is None or next_due > end:
                break
            self._set(next_due)
        else:
            raise Misconfigured(
                f"something fell due {MAX_STEPS} times: advance in shorter steps, or look at what repeats itself"
            )
        self._set(end)
        self._wait_until_idle(with_schedules=with_schedules)

    def advance_to_end(self, check: Callable[[int], None]) -> None:
        """Let time pass until nothing is left that falls due, but schedules, which have no end.

        Args:
            check: Called with each next time, in ms since 1970, before it comes; it may raise.

        Raises:
            TimeoutError: As `advance`.
        """
        for _ in range(MAX_STEPS):
            next_due = self._wait_until_idle(with_schedules=False).next_due
            if next_due is None:
                return
            check(next_due)
            self._set(next_due)
        raise Misconfigured(
            f"something fell due {MAX_STEPS} times: does a task send itself again, or does a run wait in a loop?"
        )

    def wait_until_idle(self, *, with_schedules: bool = True) -> None:
        """Wait until no job is on a queue or runs, and nothing else is left to do at this time.

        Raises:
            TimeoutError: That has not come within 30 real seconds. The error names what is left.
        """
        self._wait_until_idle(with_schedules=with_schedules)

    def _wait_until_idle(self, *, with_schedules: bool = True) -> RemainingWork:
        """Wait until nothing is left, and return when something falls due next."""
        end = time.monotonic() + STEP_LIMIT
        next_wake = time.monotonic() + WAKE_INTERVAL
        while (remaining := self._measure(with_schedules=with_schedules)).queue:
            if remaining.what == calls.WAITS_AT_LIMIT:
                wait = self._rates.find_next(self._list_queues())
                # A job that was admitted before the starts were read is seen now.
                if wait is not None and self._measure(with_schedules=with_schedules) == remaining:
                    dues = [remaining.next_due, self._now + wait if wait > 0 else None]
                    return RemainingWork(
                        "", "", b"", min((due for due in dues if due is not None), default=None)
                    )
            now = time.monotonic()
            if now > end:
                raise TimeoutError(_describe(remaining))
            if now > next_wake:
                next_wake = now + WAKE_INTERVAL
                self._wake(self._list_queues())
            self._pause(LOOK_INTERVAL)
        return remaining

    def _measure(self, *, with_schedules: bool) -> RemainingWork:
        call = calls.find_remaining_work(
            self._app.keys, self._list_queues(), self._now, with_schedules=with_schedules
        )
        return self._redis.perform(call)

    def _list_queues(self) -> list[QueueKeys]:
        names = self._redis.perform(queue_calls.list_queues(self._app.keys))
        scheduled = self._redis.perform(scheduling_calls.list_schedule_queues(self._app.keys))
        return [self._app.queue(name) for name in (*dict.fromkeys((*names, *scheduled)), EVENTS)]

    def _set(self, now: int) -> None:
        """Set the time: what it outlives is gone first, then the worker looks at what is due."""
        queues = self._list_queues()
        self._reduce_ttls(queues, now - self._now)
        self._redis.perform(calls.set_virtual_time(now))
        self._now = now
        WALL_CLOCK.set_virtual_time(now / 1000)
        self._wake(queues)

    def _reduce_ttls(self, queues: list[QueueKeys], passed: int) -> None:
        if passed <= 0:
            return
        prefixes, cursor = calls.list_expiring_prefixes(self._app.keys, queues), 0
        start_prefixes = calls.list_start_prefixes(self._app.keys, queues)
        names = set[str]()  # a scan may return a key twice, and its life is shortened once
        while True:
            cursor, found = self._redis.perform(scan_keys(cursor, self._app.keys.pattern, count=PAGE))
            names.update(name for name in found if name.startswith((*prefixes, *start_prefixes)))
            if cursor == 0:
                break
        starts = sorted(name for name in names if name.startswith(start_prefixes))
        for ordered in (starts, sorted(names.difference(starts))):
            for first in range(0, len(ordered), PAGE):
                page = ordered[first : first + PAGE]
                self._redis.perform(calls.reduce_ttls(page, passed, are_starts=ordered is starts))

    def _wake(self, queues: list[QueueKeys]) -> None:
        channels = [*[queue.wake for queue in queues], self._app.keys.schedule_changes]
        self._redis.perform_all([calls.wake(channel) for channel in channels])
        self._rates.wake(queues)


@contextmanager
def set_clock(
    app: App, url: str, start_time: float | None, pause: Callable[[float], object] = time.sleep
) -> Generator[VirtualClock, None, None]:
    """Let time stand still for jobs on the server at `url`, and in this process, while the block lasts.

    The clock calls `pause` with the seconds between two looks at what is left.
    """
    if WALL_CLOCK.is_virtual:
        raise Misconfigured("virtual_time is in force already: a process has one clock")
    redis = BlockingRedis(Endpoint.from_url(url))
    try:
        start = redis.perform(SERVER_TIME) if start_time is None else start_time
        _check_seconds("start_time", start)
        now = int(start * 1000)
        redis.perform(calls.set_virtual_time(now))
        WALL_CLOCK.set_virtual_time(now / 1000)
        try:
            yield VirtualClock(app, redis, now, pause)
        finally:
            WALL_CLOCK.set_virtual_time(None)
            redis.perform(calls.end_virtual_time())
    finally:
        redis.close()


def _check_seconds(what: str, seconds: object) -> None:
    if not isinstance(seconds, int | float) or not 0 <= seconds <= MOST_SECONDS:
        raise ValueError(f"{what} is {seconds!r}: give a number of seconds, from 0 on")


def _describe(remaining: RemainingWork) -> str:
    """Return what is left, and the task of the first job of it."""
    task = ""
    if remaining.message:
        try:
            task = f", the first one of task {read_command(remaining.message).task}"
        except CeleryError:
            task = ", the first one of a message that cannot be read"
    return (
        f"after {STEP_LIMIT:g} s queue {remaining.queue} still has {remaining.what}{task}: virtual time passes "
        "only when all jobs have ended; does one wait for real time, or does no worker of the test read that queue?"
    )
