"""Gated: one queue with a gate on it, every trip as a method, and what Redis then has of it.

Floor: tests. Reads and writes: the keys of one queue of one application that only the test has.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from celery5.broker import calls, gating
from celery5.broker.calls import Entry
from celery5.broker.gating import Asked, Handed
from celery5.protocol.delivery import Delivery
from celery5.protocol.envelope import Envelope, encode, read_envelope
from celery5.protocol.limits import Rule, leaves_at, line_of
from celery5.publisher import PORTION
from tests.redis.one_queue import Queue, Words, done

TASK = "shop.t"
_NOT_COUNTED = ("cmdstat_info", "cmdstat_config|resetstat", "cmdstat_evalsha", "cmdstat_eval")
"""What the count itself costs, and the calls of scripts, whose commands are counted one by one."""


def message(job_id: str, token: str = "", fair: str = "", expires: float | None = None) -> bytes:
    """The message of a job at a gate."""
    return encode(Envelope(v=1, id=job_id, task=TASK, concurrency_key=token, fair_key=fair, expires=expires))


class Gated(Queue):
    """One queue whose jobs all pass the gate of one rule."""

    rule = Rule(TASK, most=1)

    def send(self, *ids: str, token: str = "", fair: str = "", expires: float | None = None) -> None:
        jobs = [(each, message(each, token, fair, expires)) for each in ids]
        self(calls.publish(self.keys, jobs))

    def line_up(self, jobs: Iterable[tuple[str, str]], fair: str = "") -> None:
        """Put jobs, each an id and its concurrency key, straight into their waiting lists."""
        words = [(job, message(job, token, fair), line_of(self.rule, token, fair), "") for job, token in jobs]
        for first in range(0, len(words), PORTION):
            self(gating.line_up(self.keys, words[first : first + PORTION]))

    def commands(self) -> int:
        """Return how many commands the server has made since its counters were reset, in scripts and outside."""
        made: dict[str, Any] = self.client.info("commandstats")
        return sum(each["calls"] for name, each in made.items() if name not in _NOT_COUNTED)

    def asked(self, entry: Entry, how: str = "run") -> Asked:
        envelope = read_envelope(entry.message)
        line = line_of(self.rule, envelope.concurrency_key, envelope.fair_key)
        return Asked(entry.id, envelope.id, line, entry.deliveries, leaves_at(envelope.expires), how)

    def ask(self, worker: str, entries: Sequence[Entry], how: str = "run") -> list[int]:
        jobs = [self.asked(each, how) for each in entries]
        admitted = self(gating.admit(self.keys, worker, jobs, [(self.rule, 0)]))
        self.waits = admitted.waits
        return list(admitted.fates or [])

    def come(self, worker: str, *ids: str, token: str = "", fair: str = "") -> list[Entry]:
        """Send jobs and have a worker take them to the gate; gives those that may run."""
        self.send(*ids, token=token, fair=fair)
        entries = self.read(worker)
        fates = self.ask(worker, entries)
        return [entry for entry, fate in zip(entries, fates, strict=True) if fate == gating.RUNS]

    def pull(self, worker: str, want: int = 100) -> list[Entry]:
        handed: Handed = self(gating.pull(self.keys, worker, [(self.rule, want)]))
        self.waits = handed.waits
        return handed.entries

    def done(self, worker: str, *entries: Entry, want: int = 100) -> list[Entry]:
        """Settle jobs well; gives what the worker is handed for it."""
        words = [done(each, read_envelope(each.message).id) for each in entries]
        return self.settled(worker, entries, words, want=want).entries

    def settled(self, worker: str, entries: Sequence[Entry], words: Sequence[Words], want: int = 0) -> Handed:
        lanes = {each.lane for each in entries} or {""}
        assert len(lanes) == 1
        keys = self.keys.on(lanes.pop())
        leaving = [Delivery("mail", each.id, each.message) for each in entries]
        call = gating.settle_gated(keys, calls.settle(keys, worker, words), leaving, [(self.rule, want)])
        handed = self(call)
        assert isinstance(handed, Handed)
        self.waits = handed.waits
        return handed

    def ids(self, entries: Sequence[Entry]) -> str:
        """The ids of jobs, one word."""
        return "".join(read_envelope(each.message).id for each in entries)

    def slots(self) -> dict[str, str]:
        return _texts(self.client.hgetall(self.keys.slots))

    def taken(self) -> dict[str, str]:
        return _texts(self.client.hgetall(self.keys.counts))

    def held(self) -> dict[str, str]:
        return _texts(self.client.hgetall(self.keys.held))

    def room(self) -> list[str]:
        """The keys of the waiting room, but for those that go by themselves."""
        pattern = self.keys.room_prefix.replace("{", "[{]") + "*"
        return [key.decode() for key in self.client.scan_iter(match=pattern) if self.client.pttl(key) == -1]

    def is_empty(self) -> bool:
        """Whether nothing of a gate is left."""
        return not (self.slots() or self.taken() or self.held() or self.room())


def _texts(raw: Any) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in raw.items()}
