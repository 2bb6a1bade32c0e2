"""Leaving: a worker that stops finishes what it has in hand, and others continue the rest at once."""

from collections import Counter, defaultdict

import trio

from celery5 import App
from celery5.streams import StreamEvents
from tests.redis.worker.workers import LEASE, start, until, until_async


async def test_while_a_worker_finishes_a_slow_record_others_continue_its_other_partitions(app: App) -> None:
    numbers = app.stream("numbers", int, by=str, partitions=8)
    seen, begun, go_on = defaultdict[int, list[int]](list), Counter[int](), trio.Event()

    @app.processor(numbers, grace_period=20)
    async def look(events: StreamEvents[int]) -> None:
        async for number in events.records():
            begun[number] += 1
            if number == 0:
                await go_on.wait()
            seen[events.partition].append(number)

    async def owners() -> Counter[str]:
        (state,) = await app.streams.ainfo()
        return Counter(partition.owner for group in state.groups for partition in group.partitions)

    async def is_shared(*shares: int) -> bool:
        found = await owners()
        return "" not in found and sorted(found.values()) == sorted(shares)

    async with trio.open_nursery() as nursery:
        first = await start(nursery, app)
        await until_async(lambda: is_shared(8))
        (slow,) = await numbers.asend(0)
        await until(lambda: begun[0] == 1)
        second = await start(nursery, app)
        first.scope.cancel()
        await until_async(lambda: is_shared(1, 7))
        sent = await numbers.asend(*range(1, 200))
        others = sum(record.partition != slow.partition for record in sent)
        await until(lambda: sum(map(len, seen.values())) == others)
        await trio.sleep(2 * LEASE)  # it stays a member, and so the owner
        assert begun[0] == 1
        assert not first.ended.is_set()
        go_on.set()
        await first.ended.wait()
        await until(lambda: sum(map(len, seen.values())) == 200)
        await second.stop()
    assert set(begun.values()) == {1}
    assert all(found == sorted(found) for found in seen.values())


async def test_the_grace_periods_of_records_and_jobs_do_not_add_up(url: str, app_name: str) -> None:
    grace = 1.5
    app = App(app_name, broker=url, lease=LEASE, grace_period=grace)
    numbers = app.stream("numbers", int, by=str, partitions=1)
    begun, ended = set[str](), dict[str, float]()

    async def hang(name: str) -> None:
        begun.add(name)
        try:
            await trio.sleep_forever()
        finally:
            ended[name] = trio.current_time()

    @app.processor(numbers)
    async def look(events: StreamEvents[int]) -> None:
        async for _ in events.records():
            await hang("record")

    @app.task
    async def work() -> None:
        await hang("job")

    async with trio.open_nursery() as nursery:
        worker = await start(nursery, app)
        await numbers.asend(1)
        await work.adelay()
        await until(lambda: begun == {"record", "job"})
        asked = trio.current_time()
        await worker.stop()
        stopped = trio.current_time()
    assert grace <= ended["record"] - asked < 2 * grace
    assert stopped - asked < 2 * grace
    assert "job" in ended
    app.close()
