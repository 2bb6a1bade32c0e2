"""Streams, events, limits and the audit trail in the dashboard: what is behind, what is imposed, and who did it."""

from typing import Any

import pytest

from celery5 import App
from celery5.streams import StreamEvents
from tests.redis.dashboard.client import looking_at
from tests.redis.worker.workers import until_async, working


def declare(app: App) -> None:
    """A stream whose processor fails at negative amounts, and an event with a subscriber."""
    orders = app.stream("orders", dict, by=lambda order: order["customer"], partitions=2)

    @app.processor(orders, then="park-key")
    async def bill(events: StreamEvents[dict[str, Any]]) -> None:
        async for order in events.records():
            if order["amount"] < 0:
                raise ValueError("no <b>amount</b>")

    @app.task(name="receipt")
    async def receipt(order: int) -> None: ...

    @app.event
    class Paid:
        order: int

    Paid.subscribe(receipt)  # type: ignore[attr-defined]


async def until_parked(app: App, count: int) -> None:
    async def are_parked() -> bool:
        return len(await app.streams.parked_keys.aread("orders", "bill")) == count

    await until_async(are_parked)


async def test_parked_keys_are_seen_with_their_reason_and_discarded(app: App) -> None:
    declare(app)
    async with working(app), looking_at(app, role="operator") as client:
        orders: Any = app.streams["orders"]
        await orders.asend({"customer": "ada", "amount": 1}, {"customer": "bob", "amount": -1})
        await until_parked(app, 1)
        assert "1 key parked" in await client.look("streams")
        html = await client.load("streams/orders/bill")
        assert "no &lt;b&gt;amount" in html
        assert "bob" in html
        await client.press("stream:release", stream="orders", group="bill", keys="bob", discard="true")
        await until_parked(app, 0)
    entry = (await app.audit.alist(action="stream:release"))[0]
    assert (entry.who, entry.source) == ("anna", "dashboard")


async def test_an_event_shows_its_subscribers(app: App) -> None:
    declare(app)
    async with working(app), looking_at(app, role="viewer") as client:

        async def is_seen() -> bool:
            return "receipt" in await client.look("events")

        await until_async(is_seen)
        (state,) = await app.events.astate()
        assert "receipt" in await client.look(f"events/{state.event}")


async def test_a_limit_is_imposed_and_lifted_and_both_are_in_the_audit_trail(app: App) -> None:
    declare(app)
    async with looking_at(app, role="operator") as client:
        await client.press("task:limit", task="receipt", limit="3")
        assert "receipt 3" in await client.look("limits")
        await client.press("task:suspend", task="receipt", why="a deploy")
        assert "suspended a deploy" in await client.look("limits")
        await client.press("task:limit", task="receipt", limit="none")
        await client.press("task:resume", task="receipt")
        assert "No task has a limit" in await client.look("limits")
        trail = await client.look("audit", who="anna", action="task:suspend")
        assert "anna dashboard task:suspend receipt" in trail
        assert "task:limit receipt" not in trail


async def test_what_redis_holds_is_on_a_page(app: App) -> None:
    declare(app)
    await app.tasks["receipt"].adelay(1)
    async with looking_at(app, role="viewer") as client:
        shown = await client.look("storage")
        assert "Memory used" in shown
        assert "noeviction" in shown
        found = await client.ask("queue:storage")
        assert [row["jobs"] for row in found["queues"]] == [1]


@pytest.mark.parametrize(
    ("operation", "values"),
    [
        ("stream:seek", {"stream": "orders", "group": "bill", "to": "earliest"}),
        ("stream:reshard", {"stream": "orders", "partitions": "4"}),
        ("event:unsubscribe", {"event": "Paid", "task": "receipt"}),
    ],
)
async def test_an_operator_does_not_do_what_an_admin_does(
    app: App, operation: str, values: dict[str, str]
) -> None:
    async with looking_at(app, role="operator") as client:
        await client.press(operation, status=403, **values)
