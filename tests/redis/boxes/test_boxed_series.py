"""Short boxed jobs: a box is sent the next one when it has replied, and each is still a job of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery5 import RetryPolicy, TaskFailed, TaskRevoked, agather
from tests.redis.boxes import boxing
from tests.redis.worker.test_job_series import Series
from tests.redis.worker.workers import Lines, until, working

LIMIT = 60.0


@pytest.fixture
def series(url: str, app_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Series]:
    """A worker with one box, whose decisions to go on are seen."""
    monkeypatch.setenv("BOXING_APP", app_name)
    policy = RetryPolicy(max_retries=1, backoff=0.01, jitter=False)
    # On a busy machine a worker may lose a short lease: then it would end its boxes and start others.
    app = boxing.make(app_name, url, lease=60.0, box_slots=1, retry_policy=policy)
    yield Series(app, "boxed", monkeypatch)
    app.close()


async def warm_up(series: Series) -> None:
    """Run short jobs until the worker reads ahead: the first one has waited for the start of its box."""
    while not any(series.went_on):
        await agather(
            await series.app.asend_many([series.app.tasks["add"].s(1) for _ in range(50)]), timeout=LIMIT
        )
    series.went_on.clear()


async def test_each_job_that_a_box_goes_on_to_is_one_of_its_own(series: Series) -> None:
    tasks = series.app.tasks
    with Lines() as lines:
        async with working(series.app):
            await warm_up(series)
            jobs = await series.app.asend_many([tasks["seen"].s() for _ in range(100)])
            seen: list[Any] = await agather(jobs, timeout=LIMIT)
            await until(lambda: {job.id for job in jobs} <= {line["job"] for line in lines.of("job")})
    assert sum(series.went_on) > 10
    assert [(seen_job.job, seen_job.attempt) for seen_job in seen] == [(job.id, 1) for job in jobs]
    assert len({seen_job.pid for seen_job in seen}) == 1
    assert len(lines.of("job")) == len({line["job"] for line in lines.of("job")})


async def test_a_box_that_dies_fails_the_job_that_ran_and_no_other(series: Series) -> None:
    tasks = series.app.tasks
    calls = [tasks["seen"].s() for _ in range(60)]
    calls[30] = tasks["act"].s("exit 3")
    async with working(series.app):
        await warm_up(series)
        jobs = await series.app.asend_many(calls)
        with pytest.raises(TaskFailed, match="exited with code 3 while it ran the job"):
            await jobs[30].aget(LIMIT)
        seen: list[Any] = await agather([*jobs[:30], *jobs[31:]], timeout=LIMIT)
    assert any(series.went_on)
    assert {seen_job.attempt for seen_job in seen} == {1}
    assert len({seen_job.pid for seen_job in seen}) >= 2


async def test_a_job_that_a_box_goes_on_to_is_revoked(series: Series, tmp_path: Path) -> None:
    tasks, told = series.app.tasks, tmp_path / "told"
    ended = tmp_path / "told.ended"
    calls = [tasks["seen"].s() for _ in range(40)]
    calls[20] = tasks["act"].s(f"sleep {told}")
    async with working(series.app):
        await warm_up(series)
        jobs = await series.app.asend_many(calls)
        await until(told.exists)
        assert any(series.went_on)
        await jobs[20].arevoke()
        with pytest.raises(TaskRevoked):
            await jobs[20].aget(LIMIT)
        await agather([*jobs[:20], *jobs[21:]], timeout=LIMIT)
    assert ended.exists()
