"""Many queues: one worker settles the outcomes of all of them in one trip, and each once, also after a refusal."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
import trio

from celery5 import App, AsyncResult
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.observability import Middleware, SettlingBatch
from tests.redis.worker.workers import Lines, until, working

QUEUES = tuple(f"q{number}" for number in range(20))


class Gathered:
    """Jobs of many queues that end in one moment."""

    def __init__(self, app: App, client: "redis.Redis") -> None:
        self.app, self.client = app, client
        self.gate, self.begun, self.ended = trio.Event(), list[str](), list[str]()

        @app.task(name="t")
        async def run(queue: str) -> str:
            self.begun.append(queue)
            await self.gate.wait()
            self.ended.append(queue)
            return queue

        self._task = run

    async def run_first(self) -> None:
        """Run a job, after which Redis knows the scripts."""

        @self.app.task(name="first", queue=QUEUES[0])
        async def first() -> None: ...

        await (await first.adelay()).aget()

    async def begin(self) -> list[AsyncResult[str]]:
        """Send a job to each queue, and wait until all of them run."""
        results = [await self._task.options(queue=queue).adelay(queue) for queue in QUEUES]
        await until(lambda: len(self.begun) == len(QUEUES))
        return results

    def count_left(self) -> int:
        """How many jobs are on the queues."""
        return sum(self.client.xlen(self.app.queue(queue).stream) for queue in QUEUES)

    def count_reads(self) -> int:
        """How often the server has read from a connection."""
        stats: Any = self.client.info("stats")
        return int(stats["total_reads_processed"])


@pytest.fixture
def gathered(own_server: EmbeddedServer, app_name: str) -> Iterator[Gathered]:
    app = App(app_name, broker=own_server.url, concurrency=50)
    with redis.Redis.from_url(own_server.url) as client:
        yield Gathered(app, client)
    app.close()


async def test_outcomes_of_many_queues_are_settled_in_one_trip(gathered: Gathered) -> None:
    async with working(gathered.app, queues=QUEUES):
        await gathered.run_first()
        results = await gathered.begin()
        before = gathered.count_reads()
        gathered.gate.set()
        await results[-1].aget()
        assert gathered.count_reads() - before < len(QUEUES) / 2
        assert [await result.aget() for result in results] == list(QUEUES)
        assert gathered.count_left() == 0


async def test_outcomes_of_many_queues_are_settled_once_when_redis_has_refused_them(
    gathered: Gathered,
) -> None:
    client: Any = gathered.client
    with Lines() as lines:
        async with working(gathered.app, queues=QUEUES):
            results = await gathered.begin()
            client.execute_command("ACL", "SETUSER", "default", "-evalsha")
            gathered.gate.set()
            await until(lambda: bool(lines.of("results:refused")))
            assert gathered.count_left() == len(QUEUES)
            client.execute_command("ACL", "SETUSER", "default", "+evalsha")
            assert [await result.aget() for result in results] == list(QUEUES)
            assert gathered.count_left() == 0
    assert sorted(gathered.ended) == sorted(QUEUES)


async def test_middleware_surrounds_the_settling_of_each_queue(gathered: Gathered) -> None:
    left = list[int]()

    class Counting(Middleware):
        @contextmanager
        def settling(self, batch: SettlingBatch) -> Iterator[None]:
            before = gathered.count_left()
            yield
            left.append(before - gathered.count_left())

    gathered.app.add_middleware(Counting())
    async with working(gathered.app, queues=QUEUES):
        results = await gathered.begin()
        gathered.gate.set()
        assert [await result.aget() for result in results] == list(QUEUES)
    assert left == [1] * len(QUEUES)
