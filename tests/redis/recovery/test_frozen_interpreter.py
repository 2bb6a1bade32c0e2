"""Frozen interpreter: C code that holds the interpreter's lock stops every thread of a worker, but not its sidecar."""

import json
import signal
import sys
import time

import pytest
import redis

from celery5 import AsyncResult, JobState, TaskFailed
from tests.night import NIGHTLY
from tests.redis.commands.staff import Staff, wait_until
from tests.redis.worker.workers import entries, held

SCRIPT = (
    "from celery5.processes import foreground\n"
    "from tests.redis.events.historian import app\n"
    "foreground.STOP_LIMIT = 1.0\n"
    "foreground.serve(app, foreground.ServeOptions())\n"
)
PLACE = "historian.py:"
KINDS = ("trio", "child", "asyncio", "thread")
"""Who holds the lock."""
WAYS = ("sleep", "regex", "loop")
"""How it is held. All but the first keep a processor busy until the worker is ended, which takes some seconds."""
HOLDERS = [(kind, way) for kind in KINDS for way in WAYS]
if not NIGHTLY:
    HOLDERS = [(kind, way) for kind, way in HOLDERS if kind == KINDS[0] or way == WAYS[0]]


def send(staff: Staff, task: str, *args: object, time_limit: float | None = None) -> AsyncResult[object]:
    """Send one job and wait until it has begun."""
    begun = len(staff.notes())
    declared = staff.app.tasks[task]
    sent = (declared if time_limit is None else declared.options(time_limit=time_limit)).delay(*args)
    wait_until(lambda: len(staff.notes()) == begun + 1)
    return sent


def count_deliveries(staff: Staff, redis_client: "redis.Redis") -> dict[str, int]:
    """Return the deaths that were counted, by job, once all jobs are back on their queue."""
    wait_until(lambda: held(redis_client, staff.app) == {})
    stream = staff.app.queue("default").stream
    return {
        json.loads(fields[b"job"])["id"]: int(fields[b"deliveries"])
        for fields in entries(redis_client, stream)
    }


@pytest.mark.parametrize(("kind", "how"), HOLDERS)
def test_a_job_past_its_limit_that_holds_the_lock_is_ended_with_its_worker(
    staff: Staff, redis_client: "redis.Redis", kind: str, how: str
) -> None:
    worker = staff.start(grace_period=300)
    innocent = send(staff, "nap", 300.0)
    frozen = send(staff, f"freeze_{kind}", how, 600.0, time_limit=1.0)
    began = time.monotonic()
    assert worker.wait() == -signal.SIGKILL
    assert time.monotonic() - began > 1.0
    counted = count_deliveries(staff, redis_client)
    assert counted[frozen.id] == 1
    assert counted[innocent.id] == (1 if kind == "child" else 0)  # nothing tells whose task a child is
    wait_until(lambda: bool(worker.lines("interpreter:blocked")))
    (line,) = worker.lines("worker:killed")
    assert (line["level"], line["pid"]) == ("error", worker.process.pid)
    assert "the time limit of the job passed" in line["why"]
    assert PLACE in line["why"]
    if kind != "child":
        assert f"job {frozen.id} at " in line["why"]


def test_job_that_keeps_the_lock_repeatedly_dies_with_the_reason(staff: Staff) -> None:
    worker = staff.start(max_deliveries=1)
    frozen = send(staff, "freeze_trio", "regex", 0.0, time_limit=1.0)
    assert worker.wait() == -signal.SIGKILL
    another = staff.launch([sys.executable, "-c", SCRIPT], max_deliveries=1)
    assert another.wait() == -signal.SIGKILL
    with pytest.raises(TaskFailed, match="took its worker down 2 times; at last: the interp") as caught:
        frozen.get(timeout=30)
    assert frozen.status() is JobState.DEAD
    assert (caught.value.type, caught.value.reason) == ("WorkerDied", "poisoned")
    assert PLACE in caught.value.message


@pytest.mark.parametrize("kind", ["trio", "asyncio", "thread"])
def test_a_job_without_a_limit_that_holds_the_lock_is_reported_and_not_ended(staff: Staff, kind: str) -> None:
    worker = staff.start(lease=1.0)
    frozen = send(staff, f"freeze_{kind}", "sleep", 8.0)
    assert frozen.get(timeout=60) == worker.process.pid
    wait_until(lambda: len(worker.lines("interpreter:resumed")) == 1)
    line = worker.lines("interpreter:blocked")[0]
    assert f"job {frozen.id} at " in line["why"]
    assert len(staff.notes()) == 1


def test_a_limit_of_another_job_does_not_end_the_one_that_holds_the_lock(staff: Staff) -> None:
    worker = staff.start(lease=1.0)
    other = send(staff, "nap", 300.0, time_limit=1.0)
    frozen = send(staff, "freeze_thread", "sleep", 12.0)
    assert frozen.get(timeout=60) == worker.process.pid
    with pytest.raises(TaskFailed, match="time_limit"):
        other.get(timeout=60)


def test_a_second_sigterm_ends_a_worker_whose_interpreter_does_not_run(
    staff: Staff, redis_client: "redis.Redis"
) -> None:
    worker = staff.start(grace_period=300)
    innocent, frozen = send(staff, "nap", 300.0), send(staff, "freeze_trio", "loop", 0.0)
    worker.signal(signal.SIGTERM)
    time.sleep(0.1)  # two signals at once are one
    worker.signal(signal.SIGTERM)
    assert worker.wait() == -signal.SIGKILL
    assert count_deliveries(staff, redis_client) == {frozen.id: 1, innocent.id: 0}
    assert "it was told to stop at once" in worker.lines("worker:killed")[0]["why"]


def test_frozen_interpreter_is_killed_when_its_time_to_stop_is_over(
    staff: Staff, redis_client: "redis.Redis"
) -> None:
    worker = staff.launch([sys.executable, "-c", SCRIPT], grace_period=1.0)
    wait_until(lambda: len(worker.lines("worker:started")) == 1)
    frozen = send(staff, "freeze_asyncio", "regex", 0.0)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == -signal.SIGKILL
    assert count_deliveries(staff, redis_client) == {frozen.id: 1}
    assert "it was asked to stop" in worker.lines("worker:killed")[0]["why"]


def test_a_signal_for_a_process_that_a_job_has_forked_stops_no_worker(staff: Staff) -> None:
    worker = staff.start(lease=0.6)
    for _ in range(2):
        assert send(staff, "spawn").get(timeout=30) == -signal.SIGTERM
    frozen = send(staff, "freeze_trio", "sleep", 6.0)
    assert frozen.get(timeout=60) == worker.process.pid


@pytest.mark.parametrize("how", ["regex", "sleep"])
def test_a_boxed_job_that_holds_the_lock_is_ended_by_its_worker(staff: Staff, how: str) -> None:
    worker = staff.start()
    send(staff, "freeze_boxed", "sleep", 0.0).get(timeout=30)  # the next one need not wait for a box to start
    frozen = send(staff, "freeze_boxed", how, 600.0, time_limit=1.0)
    with pytest.raises(TaskFailed, match="TimeLimitExceeded"):
        frozen.get(timeout=60)
    assert send(staff, "nap", 0.0).get(timeout=30) == worker.process.pid
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
