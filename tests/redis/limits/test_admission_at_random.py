"""Gates at random: jobs come, run, fail, are revoked and expire, workers die, tasks are suspended and limits change, in
any order. Whatever happens, no more run than may, no slot leaks, and in the end nothing is left (I8, I11).

Beside the real scripts goes a model, which knows only this: who has been let in, and who has come out.
"""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from celery5.broker.calls import jobs, limits
from celery5.broker.calls.jobs import Entry
from celery5.broker.drivers.opening import open_blocking
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import Keys
from celery5.protocol.job.delivery import Settlement
from celery5.protocol.job.messages import read_command
from celery5.protocol.limits import AdmissionRule, Rate
from tests.gate_leaks import gate_leaks
from tests.night import NIGHTLY
from tests.redis.limits.limited_jobs import TASK, Gated
from tests.redis.worker.one_queue import done, failed, failed_for_good, released

STEPS = 250
RULES = (
    AdmissionRule(TASK, max_running=1),
    AdmissionRule(TASK, max_running=3),
    AdmissionRule(TASK, max_running=2, per="worker"),
    AdmissionRule(TASK, max_running=1, keyed=True),
    AdmissionRule(TASK, max_running=2, keyed=True, fair=True),
    AdmissionRule(TASK, fair=True),
    AdmissionRule(TASK, rate=Rate("1000/s")),
    AdmissionRule(TASK, suspended=True, max_running=3),
    AdmissionRule(TASK, suspended=True, max_running=3, keyed=True),
    AdmissionRule(TASK, max_running=2, per="worker", keyed=True),
)


class Walk:
    """The queue, and beside it who has been let in: by entry, the worker and the job."""

    def __init__(self, gate: Gated, seed: int) -> None:
        self.gate = gate
        self.dice = random.Random(seed)
        self.inside: dict[bytes, tuple[str, Entry]] = {}
        self.workers: list[str] = []
        self.sent = self.hired = 0
        self.revoked: set[str] = set()

    def hire(self) -> None:
        """A worker comes."""
        self.hired += 1
        self.workers.append(f"w{self.hired}")
        self.gate.join(self.workers[-1])

    def send(self) -> None:
        """A few jobs come."""
        for _ in range(self.dice.randint(1, 4)):
            self.sent += 1
            token, fair = self.dice.choice(("", "ann", "bob")), self.dice.choice(("", "large", "small"))
            expires = self.dice.choice((None, None, None, 0.001))
            self.gate.send(f"j{self.sent}", token=token, fair=fair, expires=expires)

    def read(self) -> None:
        """A worker takes what there is to the gate; sometimes its answer is lost, and it asks again."""
        worker = self.dice.choice(self.workers)
        entries = self.gate.read(worker, self.dice.randint(1, 8))
        how = "wait" if self.gate.rule.suspended else self.dice.choice(("run", "run", "wait"))
        fates = self.gate.ask(worker, entries, how) if entries else []
        if self.dice.random() < 0.2 and entries and how == "run":
            assert self.gate.ask(worker, entries, how) == fates
        for entry, fate in zip(entries, fates, strict=True):
            assert fate in (limits.ADMITTED, limits.WAITING, limits.REVOKED)
            if fate != limits.WAITING:
                self.let_in(worker, [entry])
            if fate == limits.REVOKED:
                self.settle_one(entry.id, done)

    def let_in(self, worker: str, entries: list[Entry]) -> None:
        """These run now."""
        for entry in entries:
            assert entry.id not in self.inside
            self.inside[entry.id] = (worker, entry)

    def pull(self) -> None:
        """A worker has room."""
        worker = self.dice.choice(self.workers)
        want = 0 if self.gate.rule.suspended else self.dice.randint(0, 4)
        self.let_in(worker, self.gate.pull(worker, want))

    def settle(self) -> None:
        """Some jobs of a worker end, in any way."""
        if self.inside:
            self.settle_one(
                self.dice.choice(list(self.inside)),
                self.dice.choice((done, done, failed, failed_for_good, released)),
            )

    def settle_one(self, entry_id: bytes, verb: Any) -> None:
        """One job ends; who waits may be handed over. Sometimes the call is made twice."""
        worker, entry = self.inside.pop(entry_id)
        words = verb(entry, read_command(entry.message).id)
        if verb is failed:
            words = Settlement("retry", entry.id, words[2], entry.message, 60_000, 0)
        if verb is released:
            words = Settlement("release", entry.id, words[2], entry.message, 60_000, entry.deliveries)
        want = 0 if self.gate.rule.suspended else self.dice.randint(0, 2)
        self.let_in(worker, self.gate.settled(worker, [entry], [words], want).entries)
        if self.dice.random() < 0.2:
            self.let_in(worker, self.gate.settled(worker, [entry], [words], 0).entries)

    def promote(self) -> None:
        """Time passes."""
        self.gate(jobs.promote_due_jobs(self.gate.keys, limit=100))

    def revoke(self) -> None:
        """Any job is revoked."""
        job = f"j{self.dice.randint(1, self.sent + 1)}"
        self.gate(jobs.revoke(self.gate.keys, [job], ttl=60))

    def kill(self) -> None:
        """A worker dies; another comes."""
        worker = self.workers.pop(self.dice.randrange(len(self.workers)))
        while self.gate.recover(worker, limit=self.dice.randint(1, 5), deliveries=100).has_more:
            pass
        self.inside = {entry: who for entry, who in self.inside.items() if who[0] != worker}
        self.hire()

    def change(self) -> None:
        """Another rule holds. What has been let in under the old one is counted on. What is counted for each key
        by itself stays so: that is in the code."""
        self.gate.rule = self.dice.choice([rule for rule in RULES if rule.keyed is self.gate.rule.keyed])

    def check(self, before: "Counter[str]") -> None:
        """No more than may; a lower limit holds for those who come, not for those who are in."""
        assert gate_leaks(self.gate.client, self.gate.keys) == []
        assert set(self.gate.slots()) <= {entry.decode() for entry in self.inside}
        rule, now = self.gate.rule, self.count()
        for gate, count in now.items():
            most = rule.max_running if rule.max_running is not None and rule.rate is None else count
            assert count <= max(most, before[gate]), (gate, count, rule)

    def count(self) -> "Counter[str]":
        """How many are in, by what the rule counts."""
        rule, found = self.gate.rule, Counter[str]()
        for worker, entry in self.inside.values():
            command = read_command(entry.message)
            found[
                f"{command.concurrency_key if rule.keyed else ''} {worker if rule.per == 'worker' else ''}"
            ] += 1
        return found

    def drain(self) -> None:
        """No more jobs come, and everything ends."""
        self.gate.rule = AdmissionRule(TASK, max_running=5)
        for _ in range(2000):
            self.promote()
            self.read_all()
            self.let_in(self.workers[0], self.gate.pull(self.workers[0]))
            for entry in list(self.inside):
                if entry in self.inside:
                    self.settle_one(entry, done)
            if not self.inside and not self.gate.size().unfinished:
                return
        raise AssertionError(self.gate.size())

    def read_all(self) -> None:
        """A worker takes all there is to the gate."""
        entries = self.gate.read(self.workers[0])
        fates = self.gate.ask(self.workers[0], entries) if entries else []
        for entry, fate in zip(entries, fates, strict=True):
            if fate != limits.WAITING:
                self.let_in(self.workers[0], [entry])


@pytest.fixture
def gate(url: str, app_name: str, redis_client: "redis.Redis") -> Iterator[Gated]:
    driver = open_blocking(Endpoint.from_url(url))
    yield Gated(driver, Keys(app_name).for_queue("mail"), redis_client)
    driver.close()


@pytest.mark.parametrize("seed", range(8 if NIGHTLY else 4))
def test_whatever_happens_no_more_run_than_may_and_nothing_is_left(gate: Gated, seed: int) -> None:
    gate.rule = RULES[0] if seed % 2 else RULES[3]
    walk = Walk(gate, seed)
    for _ in range(3):
        walk.hire()
    steps = [walk.send, walk.read, walk.read, walk.pull, walk.settle, walk.settle, walk.settle, walk.promote,
             walk.revoke, walk.kill, walk.change]  # fmt: skip
    weights = [4, 3, 3, 3, 4, 4, 4, 2, 1, 1, 1]
    for _ in range(STEPS):
        before = walk.count()
        rule = gate.rule
        step = walk.dice.choices(steps, weights)[0]
        step()
        walk.check(before if gate.rule is rule else walk.count())
    walk.drain()
    assert gate_leaks(gate.client, gate.keys) == []
    assert gate.is_empty()
