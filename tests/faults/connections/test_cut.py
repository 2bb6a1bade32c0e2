"""Cut: the connection ends in the middle of something. What may have run is said so, and nothing is sent
twice unasked.
"""

import random
from typing import Any

import pytest
import redis as blocking
import trio
import trio.testing

from celery5.broker.call import Call
from celery5.broker.timing import Timing
from celery5.errors import BrokerUnavailable
from tests.faults.conftest import OpenLink
from tests.faults.connections.proxy import FaultyProxy
from tests.faults.worker.calls import get, incr, raw, until

PATIENT = Timing(breaker_failures=1000, backoff_cap=0.05)
"""No breaker opens, however long the machine stands still while there is no connection."""


async def test_a_command_whose_reply_was_cut_off_may_have_run_and_is_not_sent_again(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str
) -> None:
    link = await open_link()
    proxy.cut_reply("INCR", after=0)
    with pytest.raises(BrokerUnavailable, match="cut off") as caught:
        await link.perform(incr(app_name))
    assert caught.value.maybe_done
    assert await link.perform(get(app_name)) == b"1"
    assert proxy.seen[b"INCR"] == 1
    assert proxy.connections == 2


@pytest.mark.parametrize("after", [1, 2, 4, 5, 7, 14])
async def test_a_read_that_was_cut_in_the_middle_of_its_reply_is_made_again(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str, after: int
) -> None:
    link = await open_link()
    await link.perform(raw("SET", app_name, "0123456789"))
    proxy.cut_reply("GET", after=after)
    assert await link.perform(get(app_name)) == b"0123456789"
    assert proxy.seen[b"GET"] == 2


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_a_command_cut_in_the_middle_of_its_reply_is_not_sent_again(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str, after: int
) -> None:
    link = await open_link()
    proxy.cut_reply("INCR", after=after)
    with pytest.raises(BrokerUnavailable) as caught:
        await link.perform(incr(app_name))
    assert caught.value.maybe_done
    assert await link.perform(get(app_name)) == b"1"


async def test_a_repeatable_call_is_sent_again_once_and_not_more(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str
) -> None:
    link = await open_link()
    proxy.cut_reply("INCR", after=0)
    assert await link.perform(incr(app_name, repeatable=True)) == 2
    proxy.cut_reply("INCR", after=0)
    proxy.cut_reply("INCR", after=0)
    with pytest.raises(BrokerUnavailable) as caught:
        await link.perform(incr(app_name, repeatable=True))
    assert caught.value.maybe_done
    assert await link.perform(get(app_name)) == b"4"


async def test_several_calls_at_once_are_sent_again_only_if_all_of_them_may(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str
) -> None:
    link = await open_link()
    proxy.cut_reply("INCR", after=6)
    with pytest.raises(BrokerUnavailable) as caught:
        await link.perform_all([incr(app_name, repeatable=True), incr(app_name)])
    assert caught.value.maybe_done
    assert await link.perform(get(app_name)) == b"2"
    proxy.cut_reply("INCR", after=6)
    again: list[Call[Any]] = [incr(app_name, repeatable=True), get(app_name)]
    assert await link.perform_all(again) == [4, b"4"]


async def test_calls_that_were_not_sent_wait_for_the_next_connection(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str
) -> None:
    link = await open_link(PATIENT)
    proxy.refuse()
    await until(lambda: not link.connected)
    async with trio.open_nursery() as nursery:
        replies: list[int] = []

        async def count() -> None:
            replies.append(await link.perform(incr(app_name)))

        for _ in range(10):
            nursery.start_soon(count)
        await trio.testing.wait_all_tasks_blocked(0.002)
        assert link.statistics().unsent == 10
        proxy.accept()
    assert sorted(replies) == list(range(1, 11))


async def test_calls_that_were_cancelled_while_there_was_no_connection_never_run(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str
) -> None:
    link = await open_link(PATIENT)
    proxy.refuse()
    await until(lambda: not link.connected)
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(link.perform, incr(app_name))
        await until(lambda: link.statistics().unsent == 10)
        nursery.cancel_scope.cancel()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.perform, incr(app_name))
        proxy.accept()
    assert await link.perform(get(app_name)) == b"1"
    assert proxy.seen[b"INCR"] == 1


async def test_many_tasks_under_many_cuts_run_nothing_twice(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str, redis_client: blocking.Redis
) -> None:
    link = await open_link()
    outcomes: dict[str, str] = {}

    async def count(task: int) -> None:
        for turn in range(10):
            key = f"{app_name}:{task}:{turn}"
            try:
                assert await link.perform(incr(key)) == 1
                outcomes[key] = "done"
            except BrokerUnavailable as error:
                outcomes[key] = "maybe" if error.maybe_done else "not sent"
            await trio.sleep(random.uniform(0, 0.01))

    async with trio.open_nursery() as nursery:
        for task in range(50):
            nursery.start_soon(count, task)
        for _ in range(8):
            await trio.sleep(random.uniform(0.005, 0.02))
            proxy.cut_all()
            await until(lambda: link.connected)
    counts = [int(number or 0) for number in redis_client.mget(list(outcomes))]
    for outcome, counted in zip(outcomes.values(), counts, strict=True):
        assert (outcome, counted) in {("done", 1), ("maybe", 0), ("maybe", 1), ("not sent", 0)}
    redis_client.delete(*outcomes)
    assert "done" in outcomes.values()
    assert "maybe" in outcomes.values()
    assert link.statistics().inflight == link.statistics().unsent == 0
