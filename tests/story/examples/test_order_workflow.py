"""Orders that wait for approval: each is charged once, and shipped or refunded, whatever process is killed."""

from pathlib import Path

import pytest

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.examples.order_workflow import app, ledger
from celery5.examples.order_workflow.orders import Decision, order
from celery5.workflows import RunState
from tests.story.cluster.controlling import until
from tests.story.examples.killing import running_example

TARGET = "celery5.examples.order_workflow"
ORDERS = 60
ITEMS = ["cup", "pen"]
HALF_PLACER = """
import os, signal
from celery5.examples.order_workflow.orders import order
for number in range(40):
    if number == 25:
        os.kill(os.getpid(), signal.SIGKILL)
    order.options(id=f"order-{number}").start(number, ["cup", "pen"])
"""
SHIPPED = ["reserved", "charged", "packed", "packed", "shipped"]
UNDONE = ["reserved", "charged", "refunded", "released"]


def get_ledger(number: int) -> list[str]:
    """Return what was done for an order, in order."""
    return [entry.what for entry in ledger.read(number)]


def count_ended(app: App) -> int:
    """Return how many orders have come to their end."""
    return sum(run.ended is not None for run in app.workflows.list_runs(limit=1000))


def wait_for_ended(count: int) -> None:
    """Wait until this many orders have come to their end."""
    until(lambda: count_ended(app) >= count)


def decide(numbers: range) -> None:
    """Approve even orders and refuse odd ones."""
    for number in numbers:
        Decision.delay(order=number, is_approved=number % 2 == 0, by="Ann")


@pytest.mark.timeout(400)
def test_orders_are_shipped_or_refunded_although_every_process_is_killed_in_turn(
    own_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = str(tmp_path / "orders.db")
    monkeypatch.setenv("ORDERS_DB", database)
    app.use_broker(own_server.url)
    with running_example(TARGET, own_server.url, tmp_path, ORDERS_DB=database) as example:
        example.run_and_be_killed(HALF_PLACER)
        for number in range(20, ORDERS):
            order.options(id=f"order-{number}").start(number, ITEMS)
        # Nobody decides on the last ten: their deadline undoes them.
        for number in range(ORDERS, ORDERS + 10):
            order.options(id=f"order-{number}", deadline=20.0).start(number, ITEMS)
        example.kill("worker-default-1")
        decide(range(20))
        example.kill("worker-default-2")
        wait_for_ended(20)
        decide(range(20, 40))
        example.kill("router-default-1")
        wait_for_ended(40)
        decide(range(40, ORDERS))
        example.kill_controller()
        wait_for_ended(ORDERS + 10)
    states = {run.id: run.state for run in app.workflows.list_runs(limit=1000)}
    for number in range(ORDERS + 10):
        is_late, is_shipped = number >= ORDERS, number < ORDERS and number % 2 == 0
        done = get_ledger(number)
        if is_late:  # its deadline may have come before a worker did
            assert done in (UNDONE, ["reserved", "released"], []), (number, done)
        else:
            assert done == (SHIPPED if is_shipped else UNDONE), (number, done)
        expected = RunState.EXPIRED if is_late else RunState.SUCCESS if is_shipped else RunState.FAILED
        assert states[f"order-{number}"] == expected
    app.close()


def test_orders_are_placed_decided_and_shown_by_hand(own_server: EmbeddedServer, tmp_path: Path) -> None:
    database = str(tmp_path / "orders.db")
    with running_example(TARGET, own_server.url, tmp_path, ORDERS_DB=database) as example:
        assert example.run("place", 7, "cup", "pen") == "order-7 is placed\n"
        assert example.run("place", 7, "cup", "pen") == "order-7 was placed before\n"
        until(lambda: "charged 1980" in example.run("show", 7))
        example.run("decide", 7, "no", "--by", "Bo")
        until(lambda: example.run("show", 7).startswith("FAILED"))
        assert example.run("show", 7).split("\n") == [
            "FAILED",
            "  reserved cup, pen",
            "  charged 1980",
            "  refunded 1980",
            "  released",
            "",
        ]
        assert example.run("show", 8) == "unknown\n"
