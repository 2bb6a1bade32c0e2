"""Recovery, all of it: workers are killed at every point of a job's life, for each kind of task, retries or not.

Each job says what its first, second and further runs do. What it returns is the number of the run, so the document in
Redis tells which run was settled: it must be the last that the history knows of.
"""

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
import redis

from celery5 import AsyncResult, TaskFailed, gather
from celery5.broker.servers.embedded import EmbeddedServer
from tests.night import NIGHTLY
from tests.redis.commands.staff import Staff, staffed, wait_until
from tests.redis.worker.workers import entries, held
from tests.watched import watched

KINDS = ("trio", "asyncio", "thread", "boxed")
SLOTS = 4
"""Jobs of one kind that run at once in one worker."""
BOXES = 2 if NIGHTLY else 1
"""Jobs in boxes that run at once. A worker that has died starts its boxes again, and each is a whole interpreter."""
WORKERS_AND_RETRIES = [(1, 0), (2, 3)]
"""How many workers there are, and how often a task may be tried again: by day each number once."""
if NIGHTLY:
    WORKERS_AND_RETRIES += [(1, 3), (2, 0)]


@pytest.fixture(scope="module")
def staff(
    request: pytest.FixtureRequest, server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Staff]:
    """Workers that are started again whenever they die. A lease lasts longer than any test waits."""
    name = f"recovery-matrix-{request.param}-{tmp_path_factory.getbasetemp().name}"
    with watched(server), staffed(server.url, name, tmp_path_factory.mktemp("matrix")) as one:
        command = [sys.executable, "-m", "tests.redis.events.keeper", str(request.param)]
        keeper = one.launch(command, lease=50, concurrency=SLOTS, cpu_slots=SLOTS, box_slots=BOXES)
        wait_until(lambda: len(keeper.lines("worker:started")) == request.param, within=30)
        yield one


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator["redis.Redis"]:
    with redis.Redis.from_url(server.url) as one:
        yield one


def send(staff: Staff, kind: str, retries: int, *jobs: list[str]) -> list[AsyncResult[int]]:
    """Send jobs that do what they are told, run by run."""
    task = staff.app.tasks[f"act_{kind}"].options(max_retries=retries, backoff=0.01, jitter=False)
    return staff.app.send_many([task.s(acts) for acts in jobs])


def runs(staff: Staff) -> Counter[str]:
    """How often each job has begun."""
    return Counter(note.job for note in staff.notes())


def attempts(staff: Staff, job: AsyncResult[int]) -> list[int]:
    """The attempts that the runs of a job belonged to."""
    return [note.attempt for note in staff.notes() if note.job == job.id]


def assert_each_job_ended_with_its_last_run(staff: Staff, sent: list[AsyncResult[int]]) -> None:
    """None is lost, and none has run after it was settled."""
    settled = {job.id: value for job, value in zip(sent, gather(sent, timeout=30), strict=True)}
    begun = runs(staff)
    assert {job.id: begun[job.id] for job in sent} == settled


def before_it_starts(staff: Staff, kind: str, retries: int) -> None:
    """Held, read ahead with others, when one of those brings the worker down: that is no run of it, nor a death."""
    gather(
        send(staff, kind, retries, *[["return"]] * 40), timeout=20
    )  # from which the workers learn to read ahead
    sent = send(staff, kind, retries, ["die", "return"], *[["return"]] * 60)
    assert_each_job_ended_with_its_last_run(staff, sent)
    again = [job for job in sent[1:] if runs(staff)[job.id] > 1]
    assert len(again) < 20  # what ran beside it, or had just ended
    assert attempts(staff, sent[0]) == [1, 1]


def while_it_runs(staff: Staff, kind: str, retries: int) -> None:
    """A death is no attempt; a failure is, before and after."""
    (job,) = send(staff, kind, retries, ["die", "fail", "die", "return"])
    if retries:
        assert_each_job_ended_with_its_last_run(staff, [job])
        assert attempts(staff, job) == [1, 1, 2, 2]
    else:
        with pytest.raises(TaskFailed, match="run 2"):
            job.get(timeout=30)
        assert attempts(staff, job) == [1, 1]


def after_it_returned(staff: Staff, kind: str, retries: int) -> None:
    """Nobody has heard of its result, so it runs again."""
    (job,) = send(staff, kind, retries, ["return and die", "return"])
    assert_each_job_ended_with_its_last_run(staff, [job])
    assert attempts(staff, job) == [1, 1]


def in_the_middle_of_a_batch(staff: Staff, kind: str, retries: int) -> None:
    """Of those before it some are settled and some are not, those after it are held; two of them bring workers down."""
    acts = [["return"]] * 90
    acts[30] = acts[60] = ["die", "return"]
    acts[31] = ["fail", "return"] if retries else ["return"]
    sent = send(staff, kind, retries, *acts)
    assert_each_job_ended_with_its_last_run(staff, sent)
    assert all(set(attempts(staff, job)) == {1} for job in sent if job is not sent[31])


def each_time_it_runs(staff: Staff, kind: str, retries: int) -> None:
    """Poison: it is put aside after it has brought down more workers than it may, whatever is said of retries."""
    (job, *others) = send(staff, kind, retries, ["die"], *[["return"]] * 10)
    with pytest.raises(TaskFailed, match="poisoned"):
        job.get(timeout=30)
    assert attempts(staff, job) == [1] * 4
    assert len({note.pid for note in staff.notes() if note.job == job.id}) == 4
    assert_each_job_ended_with_its_last_run(staff, others)


def as_soon_as_it_is_settled(staff: Staff, kind: str, retries: int) -> None:
    """It does not run again."""
    for _ in range(3):
        (job,) = send(staff, kind, retries, ["return"])
        assert job.get(timeout=30) == 1
        os.kill(staff.notes()[-1].pid, signal.SIGKILL)
        assert_each_job_ended_with_its_last_run(staff, [job, *send(staff, kind, retries, ["return"])])


POINTS = (
    before_it_starts,
    while_it_runs,
    after_it_returned,
    as_soon_as_it_is_settled,
    in_the_middle_of_a_batch,
    each_time_it_runs,
)


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.__name__)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("staff", "retries"),
    WORKERS_AND_RETRIES,
    ids=[f"{workers} workers-{retries} retries" for workers, retries in WORKERS_AND_RETRIES],
    indirect=["staff"],
    scope="module",
)
def test_a_worker_dies(staff: Staff, client: "redis.Redis", kind: str, retries: int, point: object) -> None:
    assert callable(point)
    point(staff, kind, retries)
    wait_until(lambda: not any(held(client, staff.app).values()))
    assert entries(client, staff.app.queue("default").stream) == []
