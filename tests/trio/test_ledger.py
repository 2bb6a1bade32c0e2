"""Ledger and lease: what is held is counted by kind, and who waits hears of every change.

Floor: tests. Reads: nothing. Writes: nothing.
"""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from celery5.errors import LeaseLost
from celery5.protocol.delivery import Delivery
from celery5.services.lease import Lease, now
from celery5.services.ledger import Ledger


def delivery(entry: bytes, kind: str = "trio") -> Delivery:
    """A job in hand."""
    return Delivery("q", entry, b"{}", kind=kind)


def test_what_is_held_is_counted_by_kind() -> None:
    ledger = Ledger()
    one, two, three = delivery(b"1-0"), delivery(b"2-0"), delivery(b"3-0", "thread")
    for each in (one, two, three):
        ledger.adopt(each)
    assert (len(ledger), ledger.held("trio"), ledger.held("thread"), ledger.held("asyncio")) == (3, 2, 1, 0)
    assert ("q", b"1-0") in ledger
    assert ("other", b"1-0") not in ledger
    ledger.settled([one, three])
    ledger.settled([one])  # twice makes no difference
    assert (len(ledger), ledger.held("trio"), ledger.held("thread")) == (1, 1, 0)


async def test_a_change_is_heard_by_who_waits_and_by_who_comes_later(nursery: trio.Nursery) -> None:
    ledger = Ledger()
    heard: list[str] = []

    async def listen() -> None:
        while True:
            await ledger.changed()
            heard.append("changed")

    ledger.settled([])
    nursery.start_soon(listen)
    await wait_all_tasks_blocked()
    assert len(heard) == 1
    ledger.settled([])
    ledger.settled([])
    await wait_all_tasks_blocked()
    assert len(heard) == 2
    nursery.cancel_scope.cancel()


async def test_nobody_is_sure_of_a_lease_before_it_is_renewed_or_after_it_ended(
    nursery: trio.Nursery,
) -> None:
    lease = Lease(seconds=0.05)
    sure: list[int] = []

    async def be_sure(n: int) -> None:
        await lease.sure()
        sure.append(n)

    nursery.start_soon(be_sure, 1)
    await wait_all_tasks_blocked()
    assert sure == []
    lease.renewed(now())
    await wait_all_tasks_blocked()
    assert sure == [1]
    await trio.sleep(0.06)
    nursery.start_soon(be_sure, 2)
    await wait_all_tasks_blocked()
    lease.renewed(now() - 1)  # an answer to a question of long ago
    await wait_all_tasks_blocked()
    assert sure == [1]
    with pytest.raises(LeaseLost, match="gone"):
        raise lease.lose("gone")
    lease.renewed(now())
    await wait_all_tasks_blocked()
    assert sure == [1]
    nursery.cancel_scope.cancel()
