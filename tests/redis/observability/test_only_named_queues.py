"""Queues of which there is nothing but the name, since only a worker that has left registered it: no list has them."""

import pytest

from celery5 import App
from celery5.broker.calls import leases
from celery5.broker.calls import queues as queue_calls


async def list_shown(app: App) -> list[list[str]]:
    """The queues that `info` has, those with each shard, and those of the overview of the dashboard."""
    overview = await app.metrics.aoverview()
    return [
        sorted((await app.ainfo()).queues),
        sorted((await app.ainfo(shards=True)).queues),
        sorted(queue.name for queue in overview.queues),
    ]


async def begin(app: App, queue: str, worker: str) -> None:
    """As a worker begins to read a queue."""
    await app.aperform(leases.join_queue(app.queue(queue), worker, lease=60))
    await app.aperform(queue_calls.register_queue(app.keys, queue))


async def leave(app: App, queue: str, worker: str) -> None:
    await app.aperform(leases.leave_queue(app.queue(queue), worker))


async def test_a_queue_that_only_a_worker_has_named_goes_from_the_lists_with_it(app: App) -> None:
    await begin(app, "defualt", "w")
    assert await list_shown(app) == [["defualt"]] * 3
    await leave(app, "defualt", "w")
    assert await list_shown(app) == [[]] * 3
    assert (await app.ainfo("defualt")).queues["defualt"].is_only_named
    await begin(app, "defualt", "w")
    assert await list_shown(app) == [["defualt"]] * 3


@pytest.mark.parametrize("options", [{}, {"countdown": 3600}])
async def test_a_queue_with_jobs_is_listed_without_any_worker(app: App, options: dict[str, float]) -> None:
    @app.task(queue="mail")
    async def send() -> None: ...

    await send.options(**options).adelay()  # type: ignore[arg-type]
    assert await list_shown(app) == [["mail"]] * 3


async def test_a_queue_that_has_had_a_job_stays_in_the_lists(app: App) -> None:
    @app.task(queue="mail")
    async def send() -> None: ...

    await send.adelay()
    assert await app.aempty("mail") == 1
    assert await list_shown(app) == [["mail"]] * 3


async def test_a_paused_queue_is_listed_without_jobs(app: App) -> None:
    await begin(app, "mail", "w")
    await leave(app, "mail", "w")
    await app.control.asend("pause-queue", {"queue": "mail"}, timeout=1)
    assert await list_shown(app) == [["mail"]] * 3
