"""Keep the attempts that have ended in a process until they are sent to the history: of all failures, of others a few.

Of each task the slowest successes between two reports are kept, and one success after a random moment. Most successes
are not kept, and cost two comparisons. So no count of jobs and no random number for each of them is needed.

Records may be sent before the report, so that people find a job that has just run. A busy task, whose slower successes
displace those that were kept, sends its records with the report only: most early ones would be displaced later.
"""

import math
from collections.abc import Callable, Sequence
from heapq import heappush, heappushpop
from operator import itemgetter
from typing import NamedTuple

from celery5.protocol.job.history import JobRecord, pack_record

MAX_FAILURES = 1000
"""Failed attempts between two reports; further ones are counted."""
MAX_OTHERS = 1000
"""Successes that wait to be sent, of all tasks together."""
MAX_WAITING = 10_000
"""Records that wait while Redis is unreachable; the oldest give way."""
BATCH = 200
"""Records in one call: a script blocks the server while it runs."""
SLOWEST = 2
"""The slowest successes of each task that are kept between two reports."""


class SuccessWatch:
    """Says which successes of one task on one queue are kept: those that run longer than `slow_bar`, and the first one
    that ends after `next_sample_at`.

    Both are fields that the worker compares for each job.
    """

    __slots__ = ("_displaces", "_number", "_sample", "_slowest", "next_sample_at", "slow_bar")

    def __init__(self) -> None:
        self.slow_bar = math.inf
        self.next_sample_at = 0.0  # so that the first one of all is looked at
        # None: the record was sent early.
        self._slowest: list[tuple[float, int, JobRecord | None]] = []
        self._displaces = False
        self._sample: JobRecord | None = None
        self._number = 0

    def close(self) -> None:
        """Keep none any more."""
        self.slow_bar = self.next_sample_at = math.inf

    def open(self, next_sample_at: float) -> None:
        """Begin again, with nothing kept."""
        self.slow_bar, self.next_sample_at = -1.0, next_sample_at
        self._displaces = False

    def add(self, seconds: float, ended: float, make_record: Callable[[bool], JobRecord]) -> None:
        """Keep a success; `make_record` returns its record, and is told whether it is one of the slowest."""
        self._number += 1
        if seconds > self.slow_bar:
            item: tuple[float, int, JobRecord | None] = (seconds, self._number, make_record(True))
            if len(self._slowest) < SLOWEST:
                heappush(self._slowest, item)
            else:
                heappushpop(self._slowest, item)
                self._displaces = True
            if len(self._slowest) == SLOWEST:
                self.slow_bar = self._slowest[0][0]
        elif ended >= self.next_sample_at:
            self._sample = make_record(False)
            self.next_sample_at = math.inf

    def take(self) -> list[JobRecord]:
        """Return what is kept, and forget it."""
        taken = self._list_unsent()
        self._slowest, self._sample = [], None
        return taken

    def take_early(self) -> list[JobRecord]:
        """Return the kept records that were not returned before; none of a busy task. They are still compared with."""
        if self._displaces:
            return []
        taken = self._list_unsent()
        self._slowest = [(seconds, number, None) for seconds, number, _ in self._slowest]
        self._sample = None
        return taken

    def _list_unsent(self) -> list[JobRecord]:
        kept = [record for _, _, record in sorted(self._slowest, key=itemgetter(0, 1)) if record is not None]
        return kept if self._sample is None else [*kept, self._sample]


class HistoryBatch(NamedTuple):
    """Records for the history, packed, in one call."""

    # A name of its own for each process.
    process: str
    # Counts the batches of the process.
    number: int
    failures: Sequence[bytes]
    others: Sequence[bytes]
    # Failures that were not kept.
    lost: int


class EndedJobs:
    """Keeps what has ended in one process until the history has it.

    A batch whose fate is not known is sent again as it was, with its number, so that Redis can tell that it has come
    before.

    Args:
        process: A name that no other process has.
        random: Returns numbers in [0, 1).
    """

    def __init__(self, process: str, random: Callable[[], float]) -> None:
        self._process = process
        self._random = random
        self._failures: list[bytes] = []
        self._new_failures = 0
        self._others: list[bytes] = []
        self._lost = 0
        self._open: dict[int, SuccessWatch] = {}
        self._number = 0
        self._pending: HistoryBatch | None = None

    @property
    def has_pending(self) -> bool:
        """Whether a batch was made that has not been acknowledged."""
        return self._pending is not None

    def add_failure(self, make_record: Callable[[], JobRecord]) -> None:
        """Keep an attempt that has failed, or count it when there are too many; `make_record` returns its record."""
        if self._new_failures < MAX_FAILURES:
            self._new_failures += 1
            self._failures.append(pack_record(make_record()))
        else:
            self._lost += 1

    def add_success(
        self, watch: SuccessWatch, seconds: float, ended: float, make_record: Callable[[bool], JobRecord]
    ) -> None:
        """Keep a success that the watch has asked for."""
        if id(watch) not in self._open:
            self._open[id(watch)] = watch
            if watch.slow_bar == math.inf:
                watch.open(watch.next_sample_at)
        watch.add(seconds, ended, make_record)

    def collect(self, now: float, interval: float) -> None:
        """Take over what was kept since the last report, and begin again.

        Args:
            now: The time, in seconds since 1970.
            interval: Seconds until the next report.
        """
        self._new_failures = 0
        for watch in self._open.values():
            records = watch.take()
            if len(self._others) < MAX_OTHERS:
                self._others += [pack_record(record) for record in records]
            watch.open(now + self._random() * interval)
        self._open.clear()
        if (over := len(self._failures) - MAX_WAITING) > 0:
            del self._failures[:over]
            self._lost += over

    def collect_early(self) -> None:
        """Collect the records that can be sent before the report."""
        for watch in self._open.values():
            if len(self._others) < MAX_OTHERS:
                self._others += [pack_record(record) for record in watch.take_early()]

    def make_batch(self) -> HistoryBatch | None:
        """Return the next batch; the last one again, when it has not been acknowledged; None when nothing waits."""
        if self._pending is None and (self._failures or self._others or self._lost):
            failures = self._failures[:BATCH]
            others = self._others[: BATCH - len(failures)]
            del self._failures[: len(failures)]
            del self._others[: len(others)]
            self._number += 1
            self._pending = HistoryBatch(self._process, self._number, failures, others, self._lost)
            self._lost = 0
        return self._pending

    def acknowledge(self) -> None:
        """Note that the last batch has arrived."""
        self._pending = None
