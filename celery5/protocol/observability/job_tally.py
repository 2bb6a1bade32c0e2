"""Count the jobs that end in a process, and measure how long they waited and ran."""

from collections import defaultdict
from collections.abc import Iterator

from celery5.protocol.observability.ended_jobs import SuccessWatch
from celery5.protocol.observability.families import Exemplar, MetricFamily, make_counter, make_histogram
from celery5.protocol.observability.sketch import Sketch
from celery5.protocol.shards import get_queue_of_shard

UNKNOWN_TASK = "(unknown)"
"""Stands for tasks that are not declared here: the names in messages could be any number."""

RETRY_REQUESTED = "RETRY_REQUESTED"
"""The state under which attempts are counted that have asked for the next one, for no error: none has failed."""


class TaskTally:
    """The jobs of one task on one queue."""

    __slots__ = ("counts", "exemplar", "run_times", "successes", "wait_times")

    def __init__(self) -> None:
        # How many attempts have ended in each state.
        self.counts: defaultdict[str, int] = defaultdict(int)
        # Seconds that attempts ran, and that they waited on the queue before.
        self.run_times = Sketch()
        self.wait_times = Sketch()
        # The last run whose trace is recorded.
        self.exemplar: Exemplar | None = None
        # Which successes the history keeps.
        self.successes = SuccessWatch()

    def set_exemplar(self, traceparent: str, seconds: float, at: float) -> None:
        """Note a run, for whoever wants to see one of this many seconds; nothing if its trace is not recorded."""
        if traceparent[-2:] == "01":
            self.exemplar = Exemplar(traceparent, seconds, at)


class _Tallies(dict[tuple[str, str], TaskTally]):
    def __missing__(self, place: tuple[str, str]) -> TaskTally:
        queue = get_queue_of_shard(place[0])
        tally = self[place] = TaskTally() if queue == place[0] else self[queue, place[1]]
        return tally


class JobTally:
    """How often jobs have ended in each state, how long they ran and waited, by queue and task.

    All workers of a process share one.
    """

    def __init__(self) -> None:
        self.tallies: dict[tuple[str, str], TaskTally] = _Tallies()
        """The tallies by queue and task; a shard counts for its queue. A missing one is created on access."""

    def count_unstarted(self, queue: str, task: str, state: str, count: int = 1) -> None:
        """Count jobs that have ended in this process without having begun."""
        self.tallies[queue, task].counts[state] += count

    def items(self) -> Iterator[tuple[str, str, TaskTally]]:
        """Yield queue, task and tally."""
        for (queue, task), tally in list(self.tallies.items()):
            if get_queue_of_shard(queue) == queue:
                yield queue, task, tally

    def count_jobs(self) -> dict[tuple[str, str], int]:
        """Return how many attempts have ended, by task and state."""
        totals: defaultdict[tuple[str, str], int] = defaultdict(int)
        for _, task, tally in self.items():
            for state, count in list(tally.counts.items()):
                totals[task, state] += count
        return dict(totals)

    def sum_durations(self) -> dict[str, tuple[int, float]]:
        """Return how many attempts of each task have run, and how many seconds they took together."""
        durations: dict[str, tuple[int, float]] = {}
        for _, task, tally in self.items():
            count, seconds = durations.get(task, (0, 0.0))
            durations[task] = (count + tally.run_times.count, seconds + tally.run_times.total)
        return durations

    def count_by_state(self) -> dict[str, int]:
        """Return how many attempts have ended, by state; states without any are left out."""
        totals: defaultdict[str, int] = defaultdict(int)
        for (_, state), count in self.count_jobs().items():
            totals[state] += count
        return dict(totals)

    def metric_families(self) -> list[MetricFamily]:
        """Return the counts and durations as metrics."""
        tallies = [({"queue": queue, "task": task}, tally) for queue, task, tally in self.items()]
        return [
            make_counter(
                "celery5_jobs_total",
                "Attempts that have ended in this process, by queue, task and state.",
                *[
                    (float(count), {**labels, "state": state})
                    for labels, tally in tallies
                    for state, count in list(tally.counts.items())
                ],
            ),
            make_histogram(
                "celery5_job_run_seconds",
                "Seconds that attempts ran.",
                *[
                    (tally.run_times, labels, tally.exemplar)
                    for labels, tally in tallies
                    if tally.run_times.counts
                ],
            ),
            make_histogram(
                "celery5_job_wait_seconds",
                "Seconds that attempts waited on their queue and at limits after they could have run.",
                *[(tally.wait_times, labels, None) for labels, tally in tallies if tally.wait_times.counts],
            ),
        ]
