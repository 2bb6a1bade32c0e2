"""Run: one seeded run of the nemesis, from the first process to the verdict.

Faults strike while producers send. Then everything is healed; what was accepted must come to its end in time, jobs
behind a limit must run as cheaply as ever, everybody must stop with 0, and nothing may be left in Redis.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import msgspec
import redis
import trio

from celery5 import App
from celery5.broker.keys import EVENTS
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.protocol.scheduling.periodic import make_fire_job_id
from celery5.protocol.workflows.status import ENDED
from tests.access import Access
from tests.faults.nemesis.application import GROUP, PARTITIONS, TICK, built
from tests.faults.nemesis.cluster import Cluster
from tests.faults.nemesis.failovers import CONSUMING_AGAIN, FailoverCluster, Servers, running_servers
from tests.faults.nemesis.producers import LAST, Producer
from tests.faults.nemesis.schedule import KINDS_ON, PRODUCERS, ROUTERS, SCHEDULERS, WORKERS, Fault, schedule
from tests.faults.nemesis.verdict import (
    FAILOVERS,
    TERMINAL,
    Output,
    Record,
    Sent,
    find_restarts,
    list_pauses,
    runs_of,
    violations,
)
from tests.leaks import leaks
from tests.redis.commands.staff import Staff

LEASE = 2.0
"""Seconds. Short, so that a run of half a minute has many of them."""
BOOT_LIMIT = 60.0
"""Seconds until all processes are up."""
WORKS_AGAIN = 25.0
"""Seconds after healing until each worker has begun a job. One that was killed has to start first."""
QUIET_LIMIT = 90.0
"""Seconds after healing until all that was accepted has ended. Jobs whose workers died often run one at a time."""
FIRST = 9_000_000
"""The number of the first job of the run itself: no producer comes so far."""
BURST, BURST_KEYS = 120, 12
"""Jobs behind a limit that are sent at the end, and their keys."""
BURST_LIMIT = 20.0
"""Seconds that they may take."""
BURST_COMMANDS = 60
"""Commands that Redis may carry out for each of them, beats and periodic jobs included. The job's budget is 20."""
SHOWN = 12
"""Excuses that are printed."""
STALL = 0.5
"""Seconds by which a nap of the run itself must be late to say that the machine stood still, in leases."""


@dataclass
class Outcome:
    """What came of a run: its faults, what was wrong, what was excused and why, and some numbers."""

    seed: int
    seconds: float
    faults: tuple[Fault, ...]
    folder: Path
    on: str = "server"
    tls: bool = False
    wrong: list[str] = field(default_factory=list)
    excuses: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"nemesis --seed {self.seed} --seconds {self.seconds:g} --on {self.on}{' --tls' * self.tls}"]
        lines += [f"  {fault}" for fault in self.faults]
        lines += ["numbers: " + ", ".join(f"{name} {value}" for name, value in self.numbers.items())]
        lines += [f"excused: {excuse}" for excuse in self.excuses[:SHOWN]]
        lines += [f"excused: {len(self.excuses) - SHOWN} more"] * (len(self.excuses) > SHOWN)
        lines += [f"WRONG: {fault}" for fault in self.wrong[: 5 * SHOWN]] or ["nothing is wrong"]
        return "\n".join([*lines, f"logs and history: {self.folder}"])


def run(
    seed: int,
    seconds: float,
    folder: Path,
    *,
    on: str = "server",
    binary: str | None = None,
    tls: bool = False,
) -> Outcome:
    """Make one run on servers of its own, whose logs go to `folder`.

    `on` is what they are: one `server`, a `cluster` with replicas, or servers that `sentinel`s watch. With `tls`, they
    and the proxies speak TLS, and each process has the user that `celery5 acl` prints for its role.
    """
    name = f"nemesis-{uuid4().hex[:8]}"
    roles = ("worker", "router", "scheduler", "producer", "operator")
    access = Access(folder, name, roles) if tls else None
    record = Record(LEASE)
    outcome = Outcome(
        seed, seconds, schedule(seed, seconds, lease=LEASE, kinds=KINDS_ON[on]), folder, on, tls
    )
    with running_servers(on, binary, access) as servers:
        # The run itself reaches one server past the proxies, by its socket, without TLS.
        url = servers.url
        if access and not isinstance(servers, EmbeddedServer):
            url = access.make_url(url, "operator")
        app = built(name, broker=url)
        try:
            trio.run(_Run(app, servers, record, outcome, access).whole)
        finally:
            app.close()
    outcome.excuses = record.excuses
    return outcome


class _Run:
    """One run, step by step."""

    def __init__(
        self,
        app: App,
        servers: EmbeddedServer | Servers,
        record: Record,
        outcome: Outcome,
        access: Access | None,
    ) -> None:
        self.app = app
        self.record = record
        self.outcome = outcome
        self.staff = Staff(app, outcome.folder)
        self.fails_over = not isinstance(servers, EmbeddedServer)
        self.cluster = (
            Cluster(servers, self.staff, record, access)
            if isinstance(servers, EmbeddedServer)
            else FailoverCluster(servers, self.staff, record, access)
        )
        self._began = self._over = 0.0

    async def whole(self) -> None:
        """Boot, strike, heal, wait, measure, stop, judge."""
        async with trio.open_nursery() as nursery:
            with trio.fail_after(BOOT_LIMIT):
                await nursery.start(self.cluster.run)
            nursery.start_soon(self._watch)
            await self._strike()
            await self.cluster.heal()
            await self._works_again()
            if await self._quiet():
                await self._burst()
            await self._stop()
            nursery.cancel_scope.cancel()
        self._judge()

    async def _watch(self) -> None:
        """Note when the machine stands still: a nap ends much too late."""
        while True:
            began = time.monotonic()
            await trio.sleep(0.05)
            if time.monotonic() - began > STALL * LEASE:
                self.record.stalls.append((began, time.monotonic()))

    async def _strike(self) -> None:
        """Let producers send, and the faults strike."""
        began = self._began = time.monotonic()
        over = began + self.outcome.seconds
        producers = [
            Producer(
                name,
                self.cluster.find_url(name),
                self.record,
                app=self.app.name,
                seed=self.outcome.seed,
                until=over,
                replicas=int(self.fails_over),
            )
            for name in PRODUCERS
        ]
        with trio.move_on_after(self.outcome.seconds + LAST) as scope:
            async with trio.open_nursery() as nursery:
                try:
                    for producer in producers:
                        nursery.start_soon(producer.run)
                    async with trio.open_nursery() as faults:
                        for fault in self.outcome.faults:
                            faults.start_soon(self._strike_at, began + fault.at, fault)
                        await trio.sleep(self.outcome.seconds)
                finally:
                    for producer in producers:
                        producer.over.set()
        self._over = time.monotonic()
        if scope.cancelled_caught:
            self.outcome.wrong.append(f"a producer did not come back within {LAST:g} s")

    async def _strike_at(self, at: float, fault: Fault) -> None:
        await trio.sleep(max(0.0, at - time.monotonic()))
        await self.cluster.strike(fault)

    async def _works_again(self) -> None:
        """Send jobs until each worker has begun one, within a limit."""
        wanted, numbers = set(WORKERS), self.outcome.numbers
        end = time.monotonic() + WORKS_AGAIN
        number = FIRST + BURST
        while wanted and time.monotonic() < end:
            number += 1
            await trio.to_thread.run_sync(self._send, "plain", f"plain:{number}", 0.02)
            await trio.sleep(0.03)
            names = {life.pid: life.name for life in self.record.lives if life.ended is None}
            for ended_run in self._runs():
                if (
                    ended_run.pid in names
                    and ended_run.began > self.record.healed
                    and names[ended_run.pid] in wanted
                ):
                    wanted.discard(names[ended_run.pid])
                    numbers[f"{names[ended_run.pid]} again after"] = (
                        f"{ended_run.began - self.record.healed:.2f} s"
                    )
        if wanted:
            self.outcome.wrong.append(
                f"restart: {WORKS_AGAIN:g} s after healing {', '.join(sorted(wanted))} ran no job"
            )

    def _send(self, task: str, label: str, *arguments: Any) -> None:
        [handle] = self.app.send_many([self.app.signature(task, label, *arguments)])
        self.record.sent.append(Sent(label, task, "accepted", handle.id))

    async def _quiet(self) -> bool:
        """Wait until all that was accepted has ended, and what may have been accepted is gone, too."""
        began = time.monotonic()
        self.record.fire_times = await trio.to_thread.run_sync(self._fire_times)
        while time.monotonic() < began + QUIET_LIMIT:
            left = await trio.to_thread.run_sync(self._unfinished)
            if not left:
                self.outcome.numbers["quiet after"] = f"{time.monotonic() - self.record.healed:.1f} s"
                return True
            await trio.sleep(0.2)
        self.outcome.wrong.append(
            f"quiescence: {len(left)} jobs had not ended after {QUIET_LIMIT:g} s: {left[:5]}"
        )
        return False

    def _unfinished(self) -> list[str]:
        """Return what has not ended: accepted jobs, and whatever else waits on a queue."""
        states = self.record.states
        for job in self.record.sent:
            if job.id and states.get(job.id) not in TERMINAL:
                states[job.id] = str(self.app.result(job.id, queue="default").status())
        found = [
            f"{e.label} is {states[e.id]}" for e in self.record.sent if e.id and states[e.id] not in TERMINAL
        ]
        found += self._unfinished_runs()
        with self.cluster.client() as client:
            places: Mapping[bytes, bytes] = cast("Any", client).hgetall(self.app.queue("default").jobs)
            found += [f"{job.decode()} is at {place.decode()}" for job, place in places.items() if place[:1] != b"X"
                      and job.decode() not in self._ticks()]  # fmt: skip
            if self.fails_over:  # some records or outputs may be lost
                found += ["records wait"] * self._count_waiting_records(client)
            elif self._count_records(client, "payments") != self._count_records(client, "totals"):
                found.append("records wait")
            found += ["an event waits"] * int(cast("Any", client).xlen(self.app.queue(EVENTS).stream))
        return found

    def _unfinished_runs(self) -> list[str]:
        """Return which runs of workflows have not ended, and note how the others have."""
        states = self.record.run_states
        for job in self.record.sent:
            if job.kind == "run" and states.get(job.label) not in ENDED:
                run = self.app.workflows.find(job.label)
                states[job.label] = "UNKNOWN" if run is None else str(run.status().state)
        return [f"{label} is {state}" for label, state in states.items() if state not in (*ENDED, "UNKNOWN")]

    def _count_records(self, client: "redis.Redis", stream: str) -> int:
        keys = self.app.keys.for_stream(stream)
        return sum(cast("Any", client).xlen(keys.log(partition)) for partition in range(PARTITIONS))

    def _count_waiting_records(self, client: "redis.Redis") -> int:
        """Return how many records are not done, and how many outputs are not delivered."""
        keys = self.app.keys.for_stream("payments")
        outboxes: list[int] = [
            cast("Any", client).xlen(keys.outbox(GROUP, number)) for number in range(PARTITIONS)
        ]
        return sum(outboxes) + sum(group.lag for group in self.app.streams.info("payments")[0].groups)

    def _read_outputs(self) -> None:
        """Note what the processor has made of the records."""
        offset = time.time() - time.monotonic()
        totals, payments = self.app.keys.for_stream("totals"), self.app.keys.for_stream("payments")
        with self.cluster.client() as client:
            for partition in range(PARTITIONS):
                for entry, fields in cast("Any", client).xrange(totals.log(partition)):
                    output = msgspec.json.decode(fields[b"=json"], type=Output)
                    at = int(entry.partition(b"-")[0]) / 1000 - offset
                    self.record.outputs.append(replace(output, at=at))
            sums = cast("Any", client).hgetall(payments.state(GROUP))
            self.record.sums = {customer.decode(): int(total) for customer, total in sums.items()}

    def _ticks(self) -> set[str]:
        return set(self.record.fire_times)

    async def _burst(self) -> None:
        """Run jobs behind a limit with a key: how long they take, and how many commands Redis carries out for them."""
        before, began = self.cluster.count_commands(), time.monotonic()
        calls = [
            self.app.signature("keyed", f"keyed:{FIRST + n}", f"k{n % BURST_KEYS}", 0.002)
            for n in range(BURST)
        ]
        handles = await trio.to_thread.run_sync(self.app.send_many, calls)
        self.record.sent += [
            Sent(f"keyed:{FIRST + n}", "keyed", "accepted", handle.id) for n, handle in enumerate(handles)
        ]
        wanted = {handle.id for handle in handles}
        with trio.move_on_after(BURST_LIMIT) as scope:
            while wanted - {finished_run.job for finished_run in self._runs() if finished_run.whole}:
                await trio.sleep(0.02)
        took, commands = time.monotonic() - began, (self.cluster.count_commands() - before) / BURST
        self.outcome.numbers["gated jobs"] = f"{BURST / took:.0f}/s with {commands:.0f} commands each"
        if scope.cancelled_caught:
            self.outcome.wrong.append(f"gated: {BURST} jobs behind a limit took more than {BURST_LIMIT:g} s")
        if commands > BURST_COMMANDS:
            self.outcome.wrong.append(
                f"gated: {commands:.0f} commands for each job behind a limit, {BURST_COMMANDS} may be"
            )

    async def _stop(self) -> None:
        """Stop the Schedulers first, let what they have sent end, then stop the others; look at what is left."""
        self.record.stopping = time.monotonic()
        await self.cluster.stop(*SCHEDULERS)
        with trio.move_on_after(QUIET_LIMIT):
            while await trio.to_thread.run_sync(self._waiting):
                await trio.sleep(0.05)
        await self.cluster.stop(*ROUTERS, *WORKERS)
        await trio.to_thread.run_sync(self._unfinished)
        self.outcome.wrong += [f"leak: {leak}" for leak in await self._leaks()]
        self.outcome.wrong += await trio.to_thread.run_sync(self._list_denied)

    def _list_denied(self) -> list[str]:
        """Return what was denied to users, as servers tell, which forget it when they restart, and processes."""
        logs = [path.read_text() for path in self.outcome.folder.glob("output-*")]
        lines = [line for log in logs for line in log.splitlines() if "does not permit" in line]
        return [f"denied: {entry}" for entry in (*self.cluster.list_denied(), *lines)]

    def _waiting(self) -> bool:
        with self.cluster.client() as client:
            return bool(cast("Any", client).xlen(self.app.queue("default").stream))

    def _fire_times(self) -> list[str]:
        """Return the ids of the jobs of all fire times of the run, and of some before and after it."""
        state = self.app.schedule.show("tick")
        assert state.next is not None
        one, step = round(state.next * 1000), round(TICK * 1000)
        spread = int((self.outcome.seconds + 300) / TICK)
        return [make_fire_job_id(self.app.name, "tick", one + n * step) for n in range(-spread, 200)]

    async def _leaks(self) -> list[str]:
        """Return what is left in Redis, once those who outlive their worker have had a moment."""
        found: list[str] = []
        with trio.move_on_after(3), self.cluster.client() as client:
            while found := leaks(client):
                await trio.sleep(0.1)
        return found

    def _runs(self) -> list[Any]:
        return runs_of(self.staff.history.read_text())

    def _judge(self) -> None:
        self.record.runs = self._runs()
        self._read_outputs()
        outcome, sent = self.outcome, self.record.sent
        outcome.wrong += violations(self.record)
        outcome.numbers["sent"] = len(sent)
        for word in ("accepted", "maybe", "refused"):
            outcome.numbers[word] = sum(entry.outcome == word for entry in sent)
        outcome.numbers["runs"] = len(self.record.runs)
        if self.fails_over:
            self._judge_pauses()
        outcome.numbers["excused by failovers"] = sum(
            ": " + kind in excuse for excuse in self.record.excuses for kind in FAILOVERS
        )
        outcome.numbers["outputs"] = len(self.record.outputs)
        outcome.numbers["workflows"] = sum(state != "UNKNOWN" for state in self.record.run_states.values())

    def _judge_pauses(self) -> None:
        """Report how long no job ended, and how soon jobs ended again after the death of the queue's primary."""
        outcome, numbers = self.outcome, self.outcome.numbers
        pauses = sorted(list_pauses(self.record, self._began, self._over))
        numbers["no job ended for"] = (
            f"{pauses[-1]:.2f} s at most, {pauses[99 * len(pauses) // 100]:.3f} s at p99"
        )
        limit, name = CONSUMING_AGAIN[outcome.on], "queue" if outcome.on == "cluster" else "redis"
        for kind in FAILOVERS:
            restarts = find_restarts(self.record, kind, name)
            if restarts:
                numbers[f"jobs again after {kind}"] = " ".join(f"{restart:.2f} s" for restart in restarts)
            if kind == "kill primary":
                outcome.wrong += [
                    f"restart: {restart:.2f} s, {limit:g} s may be" for restart in restarts if restart > limit
                ]
