"""Misspelt queues: a worker warns once of a queue that no task or setting names, and not of one that has jobs."""

from celery5 import App
from celery5.broker.calls import queues as queue_calls
from tests.redis.worker.workers import Lines, working


async def test_a_misspelt_queue_is_doubted_once_however_often_the_worker_begins_again(app: App) -> None:
    doubted = set[str]()  # what incarnations of one process share
    with Lines() as lines:
        for _ in range(2):
            async with working(app, queues=("defualt",), doubted_queues=doubted):
                pass
    (warning,) = lines.of("worker:queue-not-used")
    assert warning["queue"] == "defualt"
    assert warning["hint"].endswith("names the queue 'defualt'; did you mean 'default'?")


async def test_a_queue_that_was_known_before_is_doubted_only_without_jobs(app: App) -> None:
    @app.task(queue="default")
    async def nap() -> None: ...

    for queue in ("defualt", "defaullt"):
        await app.aperform(queue_calls.register_queue(app.keys, queue))
    await nap.options(queue="defualt", countdown=3600).adelay()
    with Lines() as lines:
        async with working(app, queues=("defualt", "defaullt")):
            pass
    assert [line["queue"] for line in lines.of("worker:queue-not-used")] == ["defaullt"]


async def test_the_shards_of_a_queue_that_a_task_names_are_not_doubted(app: App) -> None:
    app.task(name="post", queue="mails")(lambda: None)
    app.configure(shards="mails=3")
    with Lines() as lines:
        async with working(app, queues=("mails",)):
            pass
    assert not lines.of("worker:queue-not-used")
