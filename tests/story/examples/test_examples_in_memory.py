"""The examples are tested as their users would test them: in memory, with neither a server nor a worker."""

import json
from pathlib import Path

import pytest

from celery5.errors import Reject, WorkflowFailed
from celery5.examples import order_workflow
from celery5.examples import shop as corner_shop
from celery5.examples.order_workflow import ledger, orders
from celery5.examples.shop import orders as shop
from celery5.examples.shop.mails import mail
from celery5.testing import in_memory


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples write into a folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORDERS_DB", str(tmp_path / "orders.db"))


def test_an_approved_order_is_shipped() -> None:
    with in_memory(order_workflow.app) as jobs:
        run = orders.order.start(7, ["cup", "pen"])
        jobs.run_due()  # run() would let the time pass in which nobody decides
        orders.Decision.delay(order=8, is_approved=False, by="Bob")
        orders.Decision.delay(order=7, is_approved=True, by="Ann")
        jobs.run()
        assert run.get(timeout=1) == "order 7: a box with a cup, a box with a pen, approved by Ann"
        assert len(jobs.ran_of(orders.pack)) == 2
        jobs.assert_ran(orders.ship, 7, approved_by="Ann", attempts=1)
        jobs.assert_not_ran(orders.refund)
    done = [entry.what for entry in ledger.read(7)]
    assert done[:2] + sorted(done[2:4]) + done[4:] == ["reserved", "charged", "packed", "packed", "shipped"]


@pytest.mark.parametrize("how", ["refused", "forgotten"])
def test_an_order_that_is_not_approved_is_undone(how: str) -> None:
    with in_memory(order_workflow.app) as jobs:
        run = orders.order.start(7, ["cup"])
        if how == "refused":
            jobs.run_due()
            orders.Decision.delay(order=7, is_approved=False, by="Ann")
        jobs.run()
        with pytest.raises(WorkflowFailed):
            run.get(timeout=1)
        jobs.assert_ran(orders.refund)
        jobs.assert_ran(orders.release)
        if how == "refused":
            assert isinstance(jobs.assert_ran(orders.follow).error, Reject)
    assert [entry.what for entry in ledger.read(7)] == ["reserved", "charged", "refunded", "released"]


def test_a_placed_order_is_charged_and_its_customer_thanked(tmp_path: Path) -> None:
    with in_memory(corner_shop.app) as jobs:
        shop.place(1, "ann", "tea", 990)
        shop.place(2, "ann", "nothing", 0)
        jobs.assert_sent(shop.OrderPlaced, order=1, customer="ann")
        jobs.run()
        jobs.assert_ran(shop.charge, 1, "ann", 990)
        assert isinstance(jobs.assert_ran(shop.charge, 2).error, Reject)
        jobs.assert_ran(mail, "ann@example.com", "Your order 1 is paid. Thank you!")
        jobs.assert_sent(shop.OrderPaid, order=1)
        jobs.assert_not_sent(shop.OrderPaid, order=2)
    assert json.loads((tmp_path / "mails.jsonl").read_text())["to"] == "ann@example.com"
