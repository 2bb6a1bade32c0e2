"""Ledger, lease, black box and suspects: what a worker knows of what it holds, and of its right to."""

import math

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from celery5.errors import LeaseLost
from celery5.protocol.job.delivery import Delivery
from celery5.services.job.in_flight import InFlightJobs, IsolatedJobs
from celery5.services.job.internal_queues import InternalTasksQueue
from celery5.services.process.lease import Lease, now
from celery5.services.process.shared_memory import SidecarMemory, number_queues
from celery5.services.process.suspect_turn import SuspectTurn


def delivery(entry: bytes, kind: str = "trio") -> Delivery:
    """A job in hand."""
    return Delivery("q", entry, b"{}", kind=kind)


def test_what_is_held_is_counted_by_kind() -> None:
    ledger = InFlightJobs()
    one, two, three = delivery(b"1-0"), delivery(b"2-0"), delivery(b"3-0", "thread")
    for running in (one, two, three):
        ledger.add(running)
    assert (len(ledger), ledger.count("trio"), ledger.count("thread"), ledger.count("asyncio")) == (
        3,
        2,
        1,
        0,
    )
    assert ("q", b"1-0") in ledger
    assert ("other", b"1-0") not in ledger
    ledger.remove([one, three])
    ledger.remove([one])  # twice makes no difference
    assert (len(ledger), ledger.count("trio"), ledger.count("thread")) == (1, 1, 0)
    assert ledger.settled_count == 2


async def test_a_change_is_heard_by_who_waits_and_by_who_comes_later(nursery: trio.Nursery) -> None:
    ledger = InFlightJobs()
    heard: list[str] = []

    async def listen() -> None:
        while True:
            await ledger.wait_changed()
            heard.append("changed")

    ledger.remove([])
    nursery.start_soon(listen)
    await wait_all_tasks_blocked()
    assert len(heard) == 1
    ledger.remove([])
    ledger.remove([])
    await wait_all_tasks_blocked()
    assert len(heard) == 2
    nursery.cancel_scope.cancel()


async def test_a_task_can_wait_until_a_number_of_jobs_were_settled(nursery: trio.Nursery) -> None:
    in_flight, jobs = InFlightJobs(), [delivery(b"%d-0" % number) for number in range(1, 6)]
    for job in jobs:
        in_flight.add(job)
    passed: list[int] = []

    async def wait() -> None:
        for count in (1, 3, 4):
            await in_flight.wait_settled(count)
            passed.append(in_flight.settled_count)

    nursery.start_soon(wait)
    in_flight.remove([])
    await wait_all_tasks_blocked()
    assert passed == []
    in_flight.remove(jobs[:1])
    await wait_all_tasks_blocked()
    assert passed == [1]
    in_flight.remove(jobs[1:2])
    await wait_all_tasks_blocked()
    assert passed == [1]
    in_flight.remove(jobs[2:])
    await wait_all_tasks_blocked()
    assert passed == [1, 5, 5]


async def test_a_lease_that_the_sidecar_has_renewed_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr("celery5.services.process.lease.now", lambda: clock)
    box = SidecarMemory(slots=1)
    lease = Lease(seconds=1.0, sidecar_memory=box)
    box.lease_until = 109.0
    with trio.fail_after(30):
        await lease.wait_until_valid()
    box.lease_until = 99.0
    clock = 108.9
    with trio.fail_after(30):
        await lease.wait_until_valid()  # it lasts until then
    clock = 109.0
    with trio.move_on_after(0.02) as limit:
        await lease.wait_until_valid()
    assert limit.cancelled_caught
    box.lease_until = 120.0
    with trio.fail_after(30):
        await lease.wait_until_valid()
    lease.mark_lost("gone")
    with trio.move_on_after(0.02) as limit:
        await lease.wait_until_valid()
    assert limit.cancelled_caught


def test_a_black_box_tells_what_each_executor_began_last() -> None:
    box = SidecarMemory(slots=2)
    numbers = number_queues(["mail", "default"])
    pens = [box.get_slot(slot, numbers) for slot in range(3)]
    assert pens[2] is None  # one too many is not noted
    first, second = pens[0], pens[1]
    assert first is not None
    assert second is not None
    first.record(Delivery("default", b"1-0", b""))
    second.record(Delivery("mail", b"18446744073709551615-18446744073709551615", b""))
    first.record(Delivery("default", b"2-0", b""))
    box.lease_until, box.sidecar_pid = 7.0, 4711
    found = box.get_started_entries(["mail", "default"])
    assert found == {"mail": [b"18446744073709551615-18446744073709551615"], "default": [b"2-0"]}
    assert box.get_started_entries([]) == {}
    box.reset()
    assert box.get_started_entries(["mail", "default"]) == {"mail": [], "default": []}
    assert (box.lease_until, box.sidecar_pid) == (0.0, 4711)


def test_a_black_box_tells_which_boxes_there_are_and_since_when() -> None:
    box = SidecarMemory(slots=1, boxes=2)
    box.add_box(41, 7)
    box.add_box(42, 8)
    box.add_box(43, 9)  # one too many is not noted
    assert box.box_groups == [(41, 7), (42, 8)]
    box.remove_box(41)
    box.remove_box(43)
    box.reset()  # a worker with a new name has them still
    box.add_box(44, 10)
    assert box.box_groups == [(44, 10), (42, 8)]


async def test_suspects_are_let_out_one_at_a_time() -> None:
    ledger, queue = InFlightJobs(), InternalTasksQueue()
    suspects = IsolatedJobs(queues={"trio": queue}, in_flight=ledger, max_deliveries=3)
    held = [Delivery("q", b"%d-0" % number, b"", 2, kind="trio", read=number) for number in range(1, 6)]
    for job in held:
        ledger.add(job)
        suspects.add(job)
    assert (list(queue.items), len(suspects)) == (held[:1], 4)
    suspects.start_next()
    assert queue.drain() == held[:1]
    ledger.remove(held[:1])
    suspects.start_next()
    assert queue.drain() == held[1:2]
    assert suspects.remove(held[2])
    assert not suspects.remove(held[1])
    assert suspects.drain(read_before=4.0) == []
    assert suspects.drain(read_before=4.1) == held[3:]
    ledger.remove(held)
    suspects.start_next()
    assert queue.drain() == []
    assert IsolatedJobs(queues={}, in_flight=ledger, max_deliveries=1).min_deaths == 1


async def test_nobody_is_sure_of_a_lease_before_it_is_renewed_or_after_it_ended(
    nursery: trio.Nursery,
) -> None:
    lease = Lease(seconds=0.05)
    sure: list[int] = []

    async def be_sure(n: int) -> None:
        await lease.wait_until_valid()
        sure.append(n)

    nursery.start_soon(be_sure, 1)
    await wait_all_tasks_blocked()
    assert sure == []
    lease.mark_renewed(now())
    await wait_all_tasks_blocked()
    assert sure == [1]
    await trio.sleep(0.06)
    nursery.start_soon(be_sure, 2)
    await wait_all_tasks_blocked()
    lease.mark_renewed(now() - 1)  # an answer to a question of long ago
    await wait_all_tasks_blocked()
    assert sure == [1]
    with pytest.raises(LeaseLost, match="gone"):
        raise lease.mark_lost("gone")
    lease.mark_renewed(now())
    await wait_all_tasks_blocked()
    assert sure == [1]
    nursery.cancel_scope.cancel()


async def test_isolated_jobs_and_records_alternate_without_starving(
    autojump_clock: MockClock,
) -> None:
    ledger, queue, turn = InFlightJobs(), InternalTasksQueue(), SuspectTurn()
    suspects = IsolatedJobs(queues={"trio": queue}, in_flight=ledger, max_deliveries=3, suspect_turn=turn)
    held = [Delivery("q", b"%d-0" % number, b"", 2, kind="trio", read=number) for number in range(1, 4)]
    for job in held:
        ledger.add(job)
    async with turn.held(limit=30.0):
        suspects.add(held[0])
        suspects.add(held[1])
        assert not queue.items
    assert queue.drain() == held[:1]
    began = trio.current_time()
    async with turn.held(limit=30.0):  # the job is longer
        assert trio.current_time() - began == 30.0
    async with trio.open_nursery() as nursery:
        trial = trio.Event()

        async def be_tried() -> None:
            async with turn.held(limit=30.0):
                trial.set()

        nursery.start_soon(be_tried)
        await wait_all_tasks_blocked()
        ledger.remove(held[:1])
        suspects.start_next()
        assert queue.drain() == []  # it was the trial's turn
        await trial.wait()
    assert queue.drain() == held[1:2]
    suspects.add(held[2])
    suspects.drain(read_before=math.inf)
    ledger.remove(held)
    suspects.start_next()
    async with turn.held(limit=30.0):
        assert trio.current_time() - began == 30.0
