"""Begun: a call that was sent before anybody waits for its reply is as safe as one that was waited for from the
start."""

import pytest
import trio
import trio.testing

from celery5.broker.call import Call
from celery5.broker.connection.pipeline import PendingRequest
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.errors import BrokerReplied, BrokerUnavailable
from tests.faults.conftest import OpenLink
from tests.faults.connections.proxy import FaultyProxy
from tests.faults.worker.calls import get, incr, raw, until


def begun(link: TrioRedis, call: Call[int]) -> PendingRequest:
    """A call that was begun."""
    ticket = link.begin(call)
    assert ticket is not None
    return ticket


async def finished(link: TrioRedis, call: Call[int], ticket: PendingRequest) -> int:
    """What came of it."""
    with trio.fail_after(30):
        return await link.finish(call, ticket)


async def quiet(link: TrioRedis) -> None:
    """Nothing is under way any more, and the writer waits."""
    await link.perform(raw("PING"))
    await trio.testing.wait_all_tasks_blocked()


@pytest.mark.parametrize("later", [True, False])
async def test_a_call_that_was_begun_is_answered_before_or_after_somebody_waits(
    open_link: OpenLink, app_name: str, later: bool
) -> None:
    link = await open_link()
    await quiet(link)
    call = incr(app_name)
    ticket = begun(link, call)
    if later:
        with trio.fail_after(30):
            while not ticket.is_done:
                await trio.sleep(0.01)
    assert await finished(link, call, ticket) == 1


async def test_what_is_begun_is_alone(proxy: FaultyProxy, open_link: OpenLink, app_name: str) -> None:
    link = await open_link()
    await quiet(link)
    call = incr(app_name)
    first = begun(link, call)
    assert link.begin(call) is None
    assert await finished(link, call, first) == 1
    assert proxy.seen[b"INCR"] == 1


async def test_nothing_is_begun_while_there_is_no_connection(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str
) -> None:
    link = await open_link()
    await quiet(link)
    proxy.refuse()
    proxy.cut_all()
    await until(lambda: not link.connected)
    assert link.begin(incr(app_name)) is None
    proxy.accept()


@pytest.mark.parametrize("waits", [True, False])
async def test_a_call_that_was_begun_and_cut_off_is_made_again_if_it_may_be(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str, waits: bool
) -> None:
    link = await open_link()
    await quiet(link)
    proxy.cut_reply("INCR", after=0)
    call = incr(app_name, repeatable=True)
    ticket = begun(link, call)
    if not waits:
        await until(lambda: proxy.connections == 2)
    assert await finished(link, call, ticket) == 2
    assert proxy.seen[b"INCR"] == 2


@pytest.mark.parametrize("waits", [True, False])
async def test_interrupted_call_is_not_repeated_unless_asked_for(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str, waits: bool
) -> None:
    link = await open_link()
    await quiet(link)
    proxy.cut_reply("INCR", after=0)
    call = incr(app_name)
    ticket = begun(link, call)
    if not waits:
        await until(lambda: proxy.connections == 2)
    with pytest.raises(BrokerUnavailable) as caught:
        await finished(link, call, ticket)
    assert caught.value.maybe_done
    assert await link.perform(get(app_name)) == b"1"


async def test_abandoned_call_is_not_made_again(
    open_link: OpenLink, proxy: FaultyProxy, app_name: str
) -> None:
    link = await open_link()
    await quiet(link)
    proxy.delay = 60
    call = incr(app_name, repeatable=True)
    ticket = begun(link, call)
    await until(lambda: proxy.seen[b"INCR"] == 1)
    with trio.move_on_after(0.02) as scope:
        await finished(link, call, ticket)
    assert scope.cancelled_caught
    proxy.delay = 0
    proxy.cut_all()
    await until(lambda: proxy.connections == 2)
    assert await link.perform(get(app_name)) == b"1"
    assert proxy.seen[b"INCR"] == 1


async def test_a_refusal_of_what_was_begun_is_raised(open_link: OpenLink, app_name: str) -> None:
    link = await open_link()
    await link.perform(raw("SET", app_name, "text"))
    await quiet(link)
    call = incr(app_name)
    ticket = begun(link, call)
    with pytest.raises(BrokerReplied):
        await finished(link, call, ticket)
