"""Gates under faults: connections are cut, servers refuse; no more run than may, each job once, no slot is left (I8).

Floor: tests. Reads and writes: the keys of the test's application.
"""

import random
from collections import Counter

import pytest
import redis
import trio

from celery5 import App, agather
from tests.faults.proxy import FaultyProxy
from tests.gate_leaks import gate_leaks
from tests.redis.workers import start


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_happens_to_the_connections_no_slot_is_lost_or_given_twice(
    proxy: FaultyProxy, url: str, app_name: str, redis_client: "redis.Redis", nursery: trio.Nursery, seed: int
) -> None:
    chance = random.Random(seed)
    behind, producer = App(app_name, broker=proxy.url, concurrency=8), App(app_name, broker=url)
    runs, now, most = Counter[int](), Counter[str](), Counter[str]()

    async def count(n: int, key: str) -> int:
        runs[n] += 1
        now[key] += 1
        most[key] = max(most[key], now[key])
        await trio.sleep(0.002)
        now[key] -= 1
        return n

    for app in (behind, producer):
        app.task(limit=2, concurrency_key="key", fair_key="key", name="count")(count)
    faults = (
        lambda: proxy.cut_reply("XREADGROUP", after=chance.choice([0, 1, 30, 300])),
        lambda: proxy.cut_reply("EVALSHA", after=chance.choice([0, 1, 2])),
        lambda: proxy.answer("EVALSHA", "LOADING Redis is loading the dataset in memory"),
        lambda: proxy.answer("EVALSHA", "OOM command not allowed when used memory > 'maxmemory'."),
        proxy.cut_all,
    )
    workers = [await start(nursery, behind) for _ in range(2)]
    sent = await producer.asend_many([producer.signature("count", n, f"k{n % 3}") for n in range(250)])
    for turn in range(40):
        if len(proxy.rules) < 3:  # faults that nothing has met yet
            chance.choice(faults)()
        await trio.sleep(chance.random() * 0.03)
        if turn % 20 == 10:
            await workers.pop(0).stop()
            proxy.rules.clear()  # who is refused when it joins does not begin
            workers.append(await start(nursery, behind))
    proxy.rules.clear()
    assert await agather(sent, timeout=60) == list(range(250))
    for each in workers:
        await each.stop()
    keys = behind.queue("default")
    assert (runs, max(most.values())) == (dict.fromkeys(range(250), 1), 2)
    assert gate_leaks(redis_client, keys) == []
    assert not redis_client.exists(keys.slots, keys.counts, keys.held)
