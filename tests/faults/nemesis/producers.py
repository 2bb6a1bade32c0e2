"""Producers: they send work of every kind and keep account of what was accepted, what may have been, and what was not.

One in plain Python, one on asyncio, one on Trio. What an error says is believed: `maybe_done` false means not sent.
"""

import asyncio
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import trio

from celery5 import App, AsyncResult, Event
from celery5.errors import BrokerError, CeleryError, StagingLost
from celery5.workflows.compose import Workflow
from tests.faults.nemesis.application import EVENT, Payment, built, workflow_of
from tests.faults.nemesis.schedule import PRODUCERS
from tests.faults.nemesis.verdict import Record, Sent

PAUSE = 0.04
"""Seconds between two sendings."""
KEYS = 4
"""Keys of the task that runs once at a time for each."""
LASTING = 0.08
"""Part of the jobs behind a limit that run for about a lease."""
CUSTOMERS = 5
"""Customers of each producer: the order of the records of one is known."""
FAILING = 0.4
"""Part of the runs of workflows that are to fail, and to be undone."""
LAST = 30.0
"""Seconds that a producer may take to end: one call may be waiting for an answer."""


@dataclass(frozen=True)
class Order:
    """What is sent in one call: the jobs or the events, and what is to be written down of each."""

    sent: tuple[Sent, ...]
    calls: tuple[Any, ...] = ()
    events: tuple[Event, ...] = ()
    records: tuple[Payment, ...] = ()
    run: Workflow[int] | None = None
    revokes: bool = False


class Producer:
    """Decides what is sent, and keeps account of it."""

    def __init__(
        self, name: str, url: str, record: Record, *, app: str, seed: int, until: float, replicas: int = 0
    ) -> None:
        self.app: App = built(app, broker=url, replicas=replicas)
        self._payments = self.app.streams["payments"]
        self.over = threading.Event()
        self._record = record
        self._name = name
        self._chance = random.Random(f"{name} {seed}")
        self._until = until
        self._next_one = 0.0
        self._number = PRODUCERS.index(name) * 1_000_000

    def next(self) -> Order:
        """Return what to send next."""
        chance, lease = self._chance, self._record.lease
        kinds = {"plain": 6, "bulk": 2, "long": 1, "threaded": 1, "flaky": 2, "dead": 1, "paced": 1,
                 "two": 3, "one": 3, "keyed": 4, "later": 2, "revoked": 1, "event": 3,
                 "records": 4, "run": 2}  # fmt: skip
        kind = chance.choices(list(kinds), list(kinds.values()))[0]
        if kind == "one":  # about as many as can run one at a time, one of them always running
            kind = "plain" if self._number >= 1_000_000 or time.monotonic() < self._next_one else "one"
            self._next_one = time.monotonic() + 1.5 * lease if kind == "one" else self._next_one
        if kind == "bulk":
            return Order(
                *self._jobs(*[("plain", (chance.uniform(0, 0.02),)) for _ in range(chance.randint(2, 30))])
            )
        if kind == "event":
            numbers = [self._count() for _ in range(chance.randint(1, 3))]
            return Order(
                tuple(Sent(f"event-{n}", "event", "") for n in numbers),
                (),
                tuple(self._event(n) for n in numbers),
            )
        if kind in ("later", "revoked"):
            return self._later(revoked=kind == "revoked")
        if kind == "records":
            return self._records()
        if kind == "run":
            fails = chance.random() < FAILING
            sent = Sent(
                f"run-{self._count()}", "run", "", states=frozenset({"FAILED" if fails else "SUCCESS"})
            )
            return Order((sent,), run=workflow_of(self.app, sent.label, fails=fails))
        left = max(0.0, self._until - time.monotonic())
        # Some of those behind a limit are long, so that most workers have one when they are cut off.
        lasting = min(chance.uniform(0.8, 1.6) * lease, left + 1) if chance.random() < LASTING else 0.0
        arguments: dict[str, tuple[Any, ...]] = {
            "plain": (chance.uniform(0, 0.05),),
            "long": (min(chance.uniform(1, 5) * lease, left + 2),),
            "threaded": (chance.uniform(0, 0.2),),
            "flaky": (chance.randint(1, 3),),
            "two": (lasting or chance.uniform(0, 0.1),),
            "one": (min(chance.uniform(1.2, 2) * lease, left + 1),),
            "keyed": (f"k{chance.randrange(KEYS)}", lasting or chance.uniform(0, 0.03)),
        }
        return Order(*self._jobs((kind, arguments.get(kind, ()))))

    def _records(self) -> Order:
        """Return some records of one customer of this producer, which has several: their order is known."""
        customer = f"{self._name}c{self._chance.randrange(CUSTOMERS)}"
        numbers = [self._count() for _ in range(self._chance.randint(1, 5))]
        sent = tuple(Sent(f"record-{n}/{customer}", "record", "") for n in numbers)
        return Order(sent, records=tuple(Payment(customer, n) for n in numbers))

    def _event(self, number: int) -> Event:
        kind: Callable[..., Event] = self.app.events[EVENT]
        return kind(number=number)

    def _count(self) -> int:
        self._number += 1
        return self._number

    def _jobs(self, *wanted: tuple[str, tuple[Any, ...]]) -> tuple[tuple[Sent, ...], tuple[Any, ...]]:
        sent: list[Sent] = []
        calls: list[Any] = []
        for kind, arguments in wanted:
            label = f"{kind}:{self._count()}" + (f":{arguments[0]}" if kind == "flaky" else "")
            ends = frozenset({"DEAD" if kind == "dead" else "SUCCESS"})
            sent.append(Sent(label, kind, "", states=ends))
            calls.append(self.app.signature("plain" if kind == "long" else kind, label, *arguments))
        return tuple(sent), tuple(calls)

    def _later(self, *, revoked: bool) -> Order:
        (sent,), _ = self._jobs(("plain", (0.0,)))
        seconds = self._chance.uniform(3, 4) if revoked else self._chance.uniform(0.2, 2)
        call = self.app.tasks["plain"].options(countdown=seconds).s(sent.label, 0.0)
        return Order((replace(sent, not_before=time.monotonic() + seconds),), (call,), revokes=revoked)

    def note(self, order: Order, handles: Sequence[Any] = (), error: CeleryError | None = None) -> None:
        """Write down what became of an order."""
        is_open = isinstance(error, BrokerError) and error.maybe_done
        outcome = "accepted" if error is None else "maybe" if is_open else "refused"
        for at, entry in enumerate(order.sent):
            handle = handles[at] if handles else None
            job = handle.id if isinstance(handle, AsyncResult) else ""
            self._record.sent.append(replace(entry, outcome=outcome, id=job, at=time.monotonic()))

    def revoked(self, done: bool | None) -> None:
        """Write down that the last job was revoked; None when nobody knows."""
        last = self._record.sent
        job = max((n for n, entry in enumerate(last) if entry.id and self._mine(entry)), default=-1)
        if done is None:
            last[job] = replace(last[job], states=frozenset({"SUCCESS", "REVOKED"}))
        elif done:
            last[job] = replace(last[job], states=frozenset({"REVOKED"}), revoked=True)

    def _mine(self, sent: Sent) -> bool:
        number = int(re.split("[-:/]", sent.label)[1])
        return number // 1_000_000 == PRODUCERS.index(self._name)

    # ---- in each colour

    def _send(self, order: Order) -> Any:
        if order.run is not None:
            return [order.run.start(id=order.sent[0].label)]
        if order.records:
            return self._payments.send(*order.records)
        return self.app.events.send(order.events) if order.events else self.app.send_many(order.calls)

    async def _asend(self, order: Order) -> Any:
        if order.run is not None:
            return [await order.run.astart(id=order.sent[0].label)]
        if order.records:
            return await self._payments.asend(*order.records)
        if order.events:
            return await self.app.events.asend(order.events)
        return await self.app.asend_many(order.calls)

    def plainly(self) -> None:
        """Send until it is over, in plain Python."""
        while not self.over.wait(PAUSE):
            order = self.next()
            try:
                handles = self._send(order)
            except (BrokerError, StagingLost) as error:
                self.note(order, error=error)
                continue
            self.note(order, handles)
            if order.revokes:
                try:
                    self.revoked(handles[0].revoke())
                except BrokerError:
                    self.revoked(None)

    async def awaiting(self, sleep: Callable[[float], Awaitable[Any]]) -> None:
        """Send until it is over, in an event loop."""
        while not self.over.is_set():
            await sleep(PAUSE)
            order = self.next()
            try:
                handles = await self._asend(order)
            except (BrokerError, StagingLost) as error:
                self.note(order, error=error)
                continue
            self.note(order, handles)
            if order.revokes:
                try:
                    self.revoked(await handles[0].arevoke())
                except BrokerError:
                    self.revoked(None)

    async def run(self) -> None:
        """Send until `over` is set, in the colour of this producer."""
        try:
            if self._name == PRODUCERS[0]:
                await trio.to_thread.run_sync(self.plainly, abandon_on_cancel=True)
            elif self._name == PRODUCERS[1]:  # abandoned only when one call hangs, which the run tells of
                await trio.to_thread.run_sync(
                    lambda: asyncio.run(self.awaiting(asyncio.sleep)), abandon_on_cancel=True
                )
            else:
                await trio.to_thread.run_sync(
                    partial(trio.run, self.awaiting, trio.sleep), abandon_on_cancel=True
                )
        finally:
            self.app.close()
