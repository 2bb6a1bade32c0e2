"""Scaling model: an application on a virtual clock, with queues that fill and workers that come and go.

Jobs arrive as the load says, each slot does one a second, workers that are wanted come three seconds later, and those
that are not go five seconds later. What reading ahead brings is left out: it changes nothing here.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from celery5.protocol.scaling.autoscale import (
    Autoscale,
    AutoscaleState,
    Scale,
    get_changes,
    get_cooldown_end,
    get_next_state,
    make_initial_state,
)
from celery5.protocol.scaling.snapshot import ClusterSnapshot, ClusterWorker, TaskLoad

LOOK = 2.0
"""Seconds between looks."""
SLOTS = 10
"""Slots of one worker; each does one job a second."""
COMES, GOES = 3.0, 5.0


class Step(NamedTuple):
    """One step that was made."""

    at: float
    before: Scale
    after: Scale

    @property
    def up(self) -> bool:
        """Whether it made anything larger."""
        return self.after > self.before


class Story(NamedTuple):
    """What happened: the steps, and at each look the time, the course and the jobs that there were."""

    steps: list[Step]
    looks: list[tuple[float, AutoscaleState, float]]

    def between(self, begin: float, end: float) -> list[Step]:
        """The steps of a time."""
        return [step for step in self.steps if begin <= step.at < end]

    def workers(self, begin: float, end: float) -> list[int]:
        """The workers that were wanted at each look of a time."""
        return [course.workers for at, course, _ in self.looks if begin <= at < end]

    def turns(self, begin: float, end: float) -> int:
        """How often the direction changed."""
        ups = [sample.up for sample in self.between(begin, end)]
        return sum(before != other for before, other in pairwise(ups))


def snapshot(jobs: float, workers: int, *, slots: int = SLOTS, kind: str = "trio") -> ClusterSnapshot:
    """So many jobs of one kind, and so many workers."""
    line = TaskLoad(queue="q", task="t", kind=kind, waiting=round(jobs))
    one = {"queues": ("q",), "slots": {kind: slots}, "max_slots": {kind: slots}}
    members = tuple(ClusterWorker(name=f"w{n}", **one) for n in range(workers))  # type: ignore[arg-type]
    return ClusterSnapshot(task_loads=(line,), workers=members)


def live(
    policy: Autoscale,
    arrivals: Callable[[float], float],
    *,
    seconds: float,
    glitch: Callable[[float], float] = lambda _now: 0.0,
) -> Story:
    """Live for so long. `arrivals` says how many jobs come in a second, `glitch` how many are seen that are not there.

    Asserts that no two steps are made within a cool-down, and that the limits hold.
    """
    alive = [0.0] * policy.minimum  # when each comes
    leaving: list[float] = []
    jobs, now = 0.0, 0.0
    course = make_initial_state(policy, snapshot(0, policy.minimum))
    story = Story([], [])
    while now < seconds:
        there = sum(at <= now for at in alive) + sum(at > now for at in leaving)
        # Those that wait, and those that run: as many as come in the second that each takes.
        there_are = jobs + min(arrivals(now), there * SLOTS) + glitch(now)
        before, course = course, get_next_state(course, policy, snapshot(there_are, there), now)
        if get_changes(before, course):
            assert now >= get_cooldown_end(before, policy), "two steps within a cool-down"
            story.steps.append(Step(now, before.scale, course.scale))
        assert policy.minimum <= course.workers <= policy.maximum
        assert 1 <= course.prefetch <= policy.prefetch
        story.looks.append((now, course, there_are))
        while len(alive) < course.workers:
            alive.append(now + COMES)
        while len(alive) > course.workers:
            leaving.append(now + GOES)
            alive.pop()
        jobs = max(0.0, jobs + LOOK * (arrivals(now) - there * SLOTS))
        now += LOOK
    return story
