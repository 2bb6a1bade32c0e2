"""Verdict: what must be true of any history of runs of workflows, whatever happened to them. Pure."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from celery5.protocol.workflows.member_ids import parse_member_id
from celery5.protocol.workflows.status import RunState, RunStatus
from tests.faults.nemesis.verdict import Life, Record, Run, doubled
from tests.faults.workflows.stories import Story

EFFECTS = ("book", "charge")
"""The tasks whose success is to be undone when their run fails. That of `build`, too: when its workflow has ended."""
DYNAMIC = ("grow", "build", "wrap", "twig", "nest", "unfold")
MAPPED = ("member", "chance", "shaky")
HEALING = ("flaky", "shaky")
SETTLED = 0.5
"""Seconds after the end of a function in which the workflow that it returned is stored."""


@dataclass
class Quiet:
    """When a run had ended, with the status then, until it was retried."""

    status: RunStatus
    began: float
    ended: float = float("inf")


@dataclass
class RunHistory:
    """All that is known of a run: its story, its jobs, and when nothing of it was to run."""

    story: Story
    jobs: list[Run] = field(default_factory=list)
    quiet: list[Quiet] = field(default_factory=list)

    def __str__(self) -> str:
        return f"run {self.story.number} ({self.story.mode})"


def read_title(job: Run) -> tuple[str, int]:
    """Return the task and the label of a job."""
    name, label, _ = job.label.split("/")
    return name, int(label)


def sort_jobs(jobs: list[Run]) -> dict[int, list[Run]]:
    """Return the jobs of each run, by its number."""
    found: dict[int, list[Run]] = defaultdict(list)
    for job in jobs:
        found[read_title(job)[1] // 1000].append(job)
    return found


def violations(record: Record, histories: list[RunHistory]) -> list[str]:
    """Return what is wrong, in one line each."""
    # Nobody knows what they did last: they were killed, or were cut off for longer than their lease.
    killed = {life.pid for life in record.lives if life.killed}
    killed |= {struck.pid for struck in record.struck if struck.kind == "partition"}
    kept = [job for job in record.runs if not may_run_again(record, job)]
    wrong = list(
        doubled(replace(record, runs=kept, lives=[end_early(life, record.runs) for life in record.lives]))
    )
    for history in histories:
        for check in (ended_as_expected, counts_add_up, quiet_once_ended, succeeded_once, on_failure_once):
            wrong += [f"{history}: {found}" for found in check(history, killed)]
        if history.story.found and history.story.found[-1] in ("FAILED", "CANCELLED", "EXPIRED"):
            for check in (undone, undone_in_order):
                wrong += [f"{history}: {found}" for found in check(history, killed)]
        else:
            wrong += [f"{history}: undone, and has not failed" for job in history.jobs if is_undo(job)]
    return wrong


def end_early(life: Life, jobs: list[Run]) -> Life:
    """Return a process that was killed with the time of its last note as its end: that may be noticed much later."""
    last = max((job.ended or job.began for job in jobs if job.pid == life.pid), default=life.began)
    return replace(life, ended=last) if life.killed else life


def may_run_again(record: Record, job: Run) -> bool:
    """Return whether a job is replayed when it has failed, or is postponed when its workflow cannot be stored."""
    name, _ = read_title(job)
    refused = any(
        blow.began <= (job.ended or job.began) + SETTLED and job.began <= blow.ended for blow in record.struck
    )
    return (name in HEALING and not job.whole) or (name in DYNAMIC and refused)


def is_undo(job: Run) -> bool:
    """Return whether a job undoes another one."""
    return job.label.startswith("undo/")


def ended_as_expected(history: RunHistory, _killed: set[int]) -> Iterator[str]:
    """It comes to what the reference says."""
    story = history.story
    for found, wanted in zip(story.found, story.ends, strict=False):
        if found not in wanted:
            yield f"came to {found!r}, not {' or '.join(map(repr, wanted))}"
    if len(story.found) < len(story.ends):
        yield f"has come to {story.found} only"


def counts_add_up(history: RunHistory, _killed: set[int]) -> Iterator[str]:
    """When it has ended, each of its jobs is counted once."""
    for quiet in history.quiet:
        one = quiet.status
        if one.state is not RunState.UNKNOWN and (
            one.pending
            or one.done + one.failed + one.skipped + one.held != one.total
            or min(one.done, one.failed, one.skipped) < 0
        ):
            yield f"its counts do not add up: {one}"


def quiet_once_ended(history: RunHistory, killed: set[int]) -> Iterator[str]:
    """Nothing of it begins when it has ended and nothing of it is active."""
    jobs = [job for job in history.jobs if job.pid not in killed and read_title(job)[0] != "tell"]
    for quiet in history.quiet:
        late = [job for job in jobs if quiet.began < job.began < quiet.ended]
        if late:
            yield f"{len(late)} jobs began when it was {quiet.status.state}: {late[0]}, quiet since {quiet.began:.3f}"


def succeeded_once(history: RunHistory, killed: set[int]) -> Iterator[str]:
    """A step that has succeeded never runs again, also when its run is retried."""
    nodes: Counter[tuple[Any, ...]] = Counter()
    for job in history.jobs:
        member = parse_member_id(job.job)
        if member and job.whole and job.pid not in killed and read_title(job)[0] not in (*DYNAMIC, "tell"):
            is_mapped = read_title(job)[0] in MAPPED
            nodes[(member.run, member.node, member.member) if is_mapped else (), job.label] += 1
    for node, count in nodes.items():
        if count > 1:
            yield f"{node} succeeded {count} times"


def on_failure_once(history: RunHistory, _killed: set[int]) -> Iterator[str]:
    """`on_failure` is called once for each failure of the run."""
    failures = sum(found in ("FAILED", "EXPIRED") for found in history.story.found) * history.story.tells
    called = {job.job for job in history.jobs if job.whole and read_title(job)[0] == "tell"}
    if len(called) != failures:
        yield f"came to {history.story.found}, and on_failure was called by {len(called)} jobs for {failures} failures"


def undone(history: RunHistory, killed: set[int]) -> Iterator[str]:
    """What has succeeded is undone once."""
    effects = jobs_of(history, (*EFFECTS, "build", "built"))
    undos = jobs_of(history, ("undo",))
    for label, jobs in effects.items():
        is_sure = any(job.whole and job.pid not in killed and read_title(job)[0] in EFFECTS for job in jobs)
        if is_sure and label not in undos:
            yield f"{jobs[0].label} ({jobs[0].job}) succeeded and was not undone"
    for label, jobs in undos.items():
        if len({job.job for job in jobs}) > 1:
            yield f"{label} was undone by {len({job.job for job in jobs})} jobs"
        if not any(job.whole for job in effects.get(label, ())):
            yield f"{label} was undone and had not succeeded"
        if not any(job.whole for job in jobs):
            yield f"the undo of {label} has not ended"


def undone_in_order(history: RunHistory, _killed: set[int]) -> Iterator[str]:
    """What came after another step is undone before it."""
    undos = jobs_of(history, ("undo",))
    for first, then in history.story.order:
        if first in undos and then in undos:
            last = max((job.ended or job.began) for job in undos[then])
            if min(job.began for job in undos[first]) < last:
                yield f"{first} was undone before {then}, which came after it"


def jobs_of(history: RunHistory, names: Collection[str]) -> dict[int, list[Run]]:
    """Return the jobs of some tasks, by their labels."""
    found: dict[int, list[Run]] = defaultdict(list)
    for job in history.jobs:
        name, label = read_title(job)
        if name in names:
            found[label].append(job)
    return found
