"""CPU shares: how many jobs run in threads at once, by what they compute, on a simulated interpreter."""

import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.protocol.scaling.cpu_shares import (
    HEADROOM,
    LATE,
    MAX_STRETCH,
    CoreWait,
    CpuShares,
    find_core_wait,
    find_waiting_time,
)

STEP = 0.001
FIRST_READING = 0.01
LONG = 0.25
CONCURRENCY = 50


@pytest.fixture(autouse=True)
def _switch_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that computes lets another compute after each step."""
    monkeypatch.setattr(sys, "getswitchinterval", lambda: STEP)


@dataclass(eq=False)
class Running:
    """A simulated job: it computes first and waits then. What it has used since it was read."""

    task: str
    computing: float
    waiting: float
    begun_at: float
    has_computed: bool = False
    read_at: float = 0.0
    cpu: float = 0.0
    wall: float = 0.0
    process_cpu: float = 0.0
    pauses: int | None = 0


class Interpreter:
    """Threads that take turns for a lock, one step of it or less each time.

    Args:
        shares: What decides how many run.
        costs: For how long a job of a task computes and waits.
        core: The part of the time in which whoever has the lock has a core.
        counts_pauses: Whether the system counts how often a thread leaves its core.
    """

    def __init__(
        self,
        shares: CpuShares,
        costs: Mapping[str, tuple[float, float]],
        core: float = 1.0,
        *,
        counts_pauses: bool = True,
    ) -> None:
        self.shares, self.costs, self.core, self.counts_pauses = shares, costs, core, counts_pauses
        self.jobs: list[Running] = []
        self.ended: Counter[str] = Counter()
        self.widths: list[int] = []
        self._line: deque[Running] = deque()
        self._time = 0.0

    @property
    def running(self) -> Counter[str]:
        return Counter(job.task for job in self.jobs)

    def run(self, queue: Sequence[str], seconds: float = 1e9) -> float:
        """Run the jobs of a queue, and return how long that took."""
        waiting, begun, read_at = deque(queue), self._time, self._time
        while (waiting or self.jobs) and self._time - begun < seconds:
            while waiting and len(self.jobs) < CONCURRENCY and self.shares.fits(self.running, waiting[0]):
                self._begin(waiting.popleft())
            self.widths.append(len(self.jobs))
            self._step()
            self._time += STEP
            if self._time - read_at >= (
                0.1 if all(map(self.shares.is_known, self.running)) else FIRST_READING
            ):
                read_at = self._time
                for job in self.jobs:
                    if self._time - job.read_at >= (LONG if self.shares.is_known(job.task) else 0):
                        self._observe(job, pauses=None)
        return self._time - begun

    def _begin(self, task: str) -> None:
        self.shares.note_begin(task)
        job = Running(task, *self.costs[task], begun_at=self._time, read_at=self._time)
        self.jobs.append(job)
        self._wait_for_lock(job)

    def _wait_for_lock(self, job: Running) -> None:
        if self._line and job.pauses is not None:
            job.pauses += 1
        self._line.append(job)

    def _step(self) -> None:
        """The first of the line computes, and leaves it, or goes to its end if others wait."""
        line = list(self._line)
        used = min(STEP * self.core, line[0].computing) if line else 0.0
        for job in self.jobs:
            if job not in line:
                job.waiting -= STEP
            elif job is line[0]:
                self._compute(job, used)
            elif job.pauses is not None:
                job.pauses += 1
            if job.has_computed:
                job.wall += STEP
                job.process_cpu += used
        for job in [job for job in self.jobs if job not in self._line and job.waiting <= 1e-9]:
            self._observe(job, pauses=job.pauses if self.counts_pauses else None)
            self.jobs.remove(job)
            self.ended[job.task] += 1

    def _compute(self, job: Running, used: float) -> None:
        if not job.has_computed:  # its run is measured from here
            job.has_computed = True
            if self.counts_pauses:
                self.shares.observe_wake_up(self._time - job.begun_at)
        job.computing -= used
        job.cpu += used
        if job.pauses is not None:
            job.pauses += 1
        self._line.popleft()
        if job.computing > 1e-9:
            self._wait_for_lock(job)

    def _observe(self, job: Running, *, pauses: int | None) -> None:
        self.shares.observe(job.task, cpu=job.cpu, wall=job.wall, process_cpu=job.process_cpu, pauses=pauses)
        job.cpu = job.wall = job.process_cpu = 0.0
        job.pauses, job.read_at = None, self._time


SLEEPS, COMPUTES, REQUESTS, REPORTS = (0.0002, 0.05), (0.05, 0.0), (0.001, 0.005), (0.005, 0.1)


def test_a_first_burst_of_waiting_jobs_runs_at_full_width_at_once() -> None:
    worker = Interpreter(CpuShares(cores=2), {"sleep": SLEEPS})
    seconds = worker.run(["sleep"] * 2500)
    assert worker.widths[15] >= 10  # a first look at jobs that run still
    assert worker.widths[60] == CONCURRENCY
    assert seconds < 3.2  # 50 rounds of 60 ms, of which all begin together; two at once would take 60 s


def test_waiting_jobs_that_take_minutes_are_known_before_one_has_ended() -> None:
    worker = Interpreter(CpuShares(cores=2), {"call": (0.0002, 60.0)})
    worker.run(["call"] * CONCURRENCY, seconds=0.2)
    assert worker.widths[-1] == CONCURRENCY
    assert not worker.ended


def test_a_first_burst_of_computing_jobs_never_has_more_threads_than_cores() -> None:
    for cores in (1, 2, 4):
        worker = Interpreter(CpuShares(cores=cores), {"compute": COMPUTES})
        worker.run(["compute"] * 100)
        assert max(worker.widths) == cores


@pytest.mark.parametrize(("costs", "most"), [(REQUESTS, 9), (REPORTS, 40)])
def test_jobs_that_do_both_get_as_many_threads_as_keep_the_interpreter_busy(
    costs: tuple[float, float], most: int
) -> None:
    worker = Interpreter(CpuShares(cores=2), {"request": costs})
    assert worker.run(["request"] * 1000) < 1.15 * 1000 * costs[0]
    assert max(worker.widths) <= most


def test_jobs_that_do_both_have_not_all_threads_where_pauses_are_not_counted() -> None:
    worker = Interpreter(CpuShares(cores=2), {"request": REQUESTS}, counts_pauses=False)
    assert worker.run(["request"] * 1000) < 2.0  # 1 s of it computes; two threads take 3 s
    assert 4 <= max(worker.widths) <= 9


def test_threads_that_never_meet_have_not_waited_for_each_other() -> None:
    shares = CpuShares(cores=2)
    for _ in range(50):
        shares.observe_wake_up(0.0001)
        shares.observe("request", cpu=0.001, wall=0.006, process_cpu=0.0058, pauses=1)
    assert shares.get_share("request") == pytest.approx(1 / 6, rel=0.1)


def test_computing_jobs_that_follow_waiting_ones_do_not_take_their_threads() -> None:
    shares = CpuShares(cores=2)
    Interpreter(shares, {"compute": COMPUTES}).run(["compute"] * 5)
    worker = Interpreter(shares, {"sleep": SLEEPS, "compute": COMPUTES})
    worker.run(["sleep"] * 500, seconds=0.4)
    most = 0
    for _ in range(200):
        worker.run(["compute"] * 2, seconds=STEP)
        most = max(most, worker.running["compute"])
    assert most == 2


def test_waiting_jobs_go_on_beside_long_computing_ones() -> None:
    shares = CpuShares(cores=2)
    worker = Interpreter(shares, {"compute": (5.0, 0.0), "sleep": SLEEPS})
    Interpreter(shares, {"sleep": SLEEPS}).run(["sleep"] * 4)
    worker.run(["compute", "compute", *["sleep"] * 200], seconds=2.0)
    assert worker.ended["sleep"] == 200
    assert shares.get_share("sleep") < 0.02  # though the interpreter was never idle


def test_a_task_that_begins_to_compute_is_held_to_the_cores_soon() -> None:
    shares = CpuShares(cores=2)
    Interpreter(shares, {"task": SLEEPS}).run(["task"] * 500)
    worker = Interpreter(shares, {"task": COMPUTES})
    worker.run(["task"] * 300)
    assert set(worker.widths[-4000:]) <= {0, 1, 2}


def test_jobs_that_wait_for_a_core_do_not_count_as_waiting() -> None:
    """Other processes take two thirds of the machine."""
    blind, seeing = CpuShares(cores=2), CpuShares(cores=2)
    seeing.observe_core_wait(2.0, process_cpu=1.0)
    most = []
    for shares in (blind, seeing):
        worker = Interpreter(shares, {"compute": COMPUTES}, core=1 / 3)
        worker.run(["compute"] * 50)
        most.append(max(worker.widths))
    assert most[0] > 4
    assert most[1] == 2


@pytest.mark.parametrize(
    ("before", "now", "seconds"),
    [
        ({}, {"1": CoreWait(0.09, 1000)}, 0.0),  # it wakes up often, on an idle machine
        ({}, {"1": CoreWait(0.09, 3)}, 0.0885),  # it waits behind others each time
        ({"1": CoreWait(1.0, 10)}, {"1": CoreWait(1.2, 11)}, 0.1995),  # since the last look
        ({}, {"1": CoreWait(0.1, 1000), "2": CoreWait(0.3, 20)}, 0.29),  # one does not make up for the other
        ({"1": CoreWait(1.0, 10)}, {}, 0.0),  # it has ended
    ],
)
def test_the_time_that_waking_up_takes_is_no_wait_for_a_core(
    before: Mapping[str, CoreWait], now: Mapping[str, CoreWait], seconds: float
) -> None:
    assert find_core_wait(before, now) == pytest.approx(seconds)


def test_a_late_loop_holds_computing_jobs_to_the_cores_and_leaves_waiting_ones() -> None:
    shares = CpuShares(cores=2)
    shares.observe("compute", cpu=0.05, wall=0.5, process_cpu=0.2)  # it waited for a core
    shares.observe("sleep", cpu=0.0001, wall=0.05, process_cpu=0.001)
    assert shares.count_slots({"compute": 2}, ["compute"] * 50, maximum=50) > 2
    for _ in range(8):
        shares.observe_lateness(3 * LATE, cpu=0.4, process_cpu=0.5)
    assert shares.count_slots({"compute": 2}, ["compute"] * 50, maximum=50) == 2
    for _ in range(200):
        shares.observe_lateness(0.0, cpu=0.4, process_cpu=0.5)
    assert shares.pressure == 1.0
    for _ in range(8):  # the loop itself is busy, with jobs that are no threads
        shares.observe_lateness(3 * LATE, cpu=0.1, process_cpu=0.9)
    assert shares.pressure == 1.0


def test_more_slots_are_shown_only_as_far_as_the_next_jobs_fit() -> None:
    shares = CpuShares(cores=2)
    assert shares.count_slots({}, [], maximum=50) == 2  # nothing is known
    shares.observe("sleep", cpu=0.0005, wall=0.05, process_cpu=0.001)
    shares.note_begin("sleep")
    assert shares.count_slots({}, [], maximum=50) == 50
    assert shares.count_slots({"sleep": 10}, ["sleep"] * 10, maximum=50) == 50
    assert shares.count_slots({"sleep": 10}, ["new"] * 10, maximum=50) == 12
    assert shares.count_slots({"sleep": 10}, ["new", "new", "new", "sleep"], maximum=50) == 12
    assert shares.count_slots({"sleep": 10}, [], maximum=5) == 5


def test_stretch_rises_at_once_falls_slowly_and_is_bounded() -> None:
    shares = CpuShares(cores=2)
    shares.observe_core_wait(100.0, process_cpu=0.1)
    assert shares.stretch == MAX_STRETCH
    shares.observe_core_wait(0.0, process_cpu=1.0)
    assert 5 < shares.stretch < MAX_STRETCH
    shares.observe_core_wait(0.0, process_cpu=0.0)
    assert shares.stretch >= 1


@pytest.mark.parametrize("width", [1, 2, 10, 50])
def test_threads_that_take_turns_have_waited_for_nothing_else(width: int) -> None:
    assert find_waiting_time(0.01, 0.01 * width, 0.01 * width) <= 0.01 * width * 0.03


seconds = st.floats(0.0, 100.0)
observations = st.lists(st.tuples(st.sampled_from("abc"), seconds, seconds, seconds), max_size=20)


@given(observations, st.lists(st.sampled_from("abcd"), max_size=60), st.integers(1, 8), st.integers(1, 60))
def test_whatever_was_observed_slots_and_shares_stay_within_their_bounds(
    observed: list[tuple[str, float, float, float]], queue: list[str], cores: int, maximum: int
) -> None:
    shares = CpuShares(cores=cores)
    for task, cpu, wall, process_cpu in observed:
        shares.observe(task, cpu=cpu, wall=wall, process_cpu=process_cpu)
        assert 0 < shares.get_share(task) <= 1
    running = Counter[str]()
    for task in queue:
        if shares.fits(running, task):
            running[task] += 1
    by_share = sorted((shares.get_share(task) for task in running.elements()), reverse=True)
    assert len(by_share) >= min(cores, len(queue))
    assert sum(by_share[cores:]) <= HEADROOM + max(1 - sum(by_share[:cores]), 0) + 1e-9
    slots = shares.count_slots(running, queue, maximum=max(maximum, cores))
    assert cores <= slots <= max(maximum, cores)
