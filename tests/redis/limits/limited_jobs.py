"""Gated: one queue with a gate on it, every trip as a method, and what Redis then has of it."""

from collections.abc import Iterable, Sequence
from typing import Any

from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.calls import limits
from celery5.broker.calls.jobs import Entry
from celery5.broker.calls.limits import AdmissionRequest, AdmittedJobs
from celery5.protocol.job.delivery import Delivery, Settlement
from celery5.protocol.job.messages import Command, encode, read_command
from celery5.protocol.limits import AdmissionRule, format_expiry, get_waiting_list
from celery5.sending.publisher import JOBS_PER_TRIP
from tests.redis.worker.one_queue import Queue, done

TASK = "shop.t"
_NOT_COUNTED = ("cmdstat_info", "cmdstat_config|resetstat", "cmdstat_evalsha", "cmdstat_eval")
"""What the count itself costs, and the calls of scripts, whose commands are counted one by one."""


def message(job_id: str, token: str = "", fair: str = "", expires: float | None = None) -> bytes:
    """The message of a job at a gate."""
    return encode(Command(v=1, id=job_id, task=TASK, concurrency_key=token, fair_key=fair, expires=expires))


class Gated(Queue):
    """One queue whose jobs all pass the gate of one rule."""

    rule = AdmissionRule(TASK, max_running=1)

    def send(self, *ids: str, token: str = "", fair: str = "", expires: float | None = None) -> None:
        jobs = [(job_id, message(job_id, token, fair, expires)) for job_id in ids]
        self(jobs_calls.publish(self.keys, jobs))

    def line_up(self, jobs: Iterable[tuple[str, str]], fair: str = "") -> None:
        """Put jobs, each an id and its concurrency key, straight into their waiting lists."""
        words = [
            (job, message(job, token, fair), get_waiting_list(self.rule, token, fair), "")
            for job, token in jobs
        ]
        for first in range(0, len(words), JOBS_PER_TRIP):
            self(limits.add_to_waiting_list(self.keys, words[first : first + JOBS_PER_TRIP]))

    def commands(self) -> int:
        """Return how many commands the server has made since its counters were reset, in scripts and outside."""
        made: dict[str, Any] = self.client.info("commandstats")
        return sum(stat["calls"] for name, stat in made.items() if name not in _NOT_COUNTED)

    def asked(self, entry: Entry, how: str = "run") -> AdmissionRequest:
        command = read_command(entry.message)
        line = get_waiting_list(self.rule, command.concurrency_key, command.fair_key)
        return AdmissionRequest(
            entry.id, command.id, line, entry.deliveries, format_expiry(command.expires), how
        )

    def ask(self, worker: str, entries: Sequence[Entry], how: str = "run") -> list[int]:
        jobs = [self.asked(entry, how) for entry in entries]
        admitted = self(limits.admit(self.keys, worker, jobs, [(self.rule, 0)]))
        self.waits = admitted.delays
        return list(admitted.outcomes or [])

    def come(self, worker: str, *ids: str, token: str = "", fair: str = "") -> list[Entry]:
        """Send jobs and have a worker take them to the gate; gives those that may run."""
        self.send(*ids, token=token, fair=fair)
        entries = self.read(worker)
        fates = self.ask(worker, entries)
        return [entry for entry, fate in zip(entries, fates, strict=True) if fate == limits.ADMITTED]

    def pull(self, worker: str, want: int = 100) -> list[Entry]:
        handed: AdmittedJobs = self(limits.admit_waiting(self.keys, worker, [(self.rule, want)]))
        self.waits = handed.delays
        return handed.entries

    def done(self, worker: str, *entries: Entry, want: int = 100) -> list[Entry]:
        """Settle jobs well; gives what the worker is handed for it."""
        words = [done(entry, read_command(entry.message).id) for entry in entries]
        return self.settled(worker, entries, words, want=want).entries

    def settled(
        self, worker: str, entries: Sequence[Entry], words: Sequence[Settlement], want: int = 0
    ) -> AdmittedJobs:
        lanes = {entry.lane for entry in entries} or {""}
        assert len(lanes) == 1
        keys = self.keys.on_lane(lanes.pop())
        leaving = [Delivery("mail", entry.id, entry.message) for entry in entries]
        call = limits.settle_limited(
            keys, jobs_calls.settle(keys, worker, words), leaving, [(self.rule, want)]
        )
        handed = self(call)
        assert isinstance(handed, AdmittedJobs)
        self.waits = handed.delays
        return handed

    def ids(self, entries: Sequence[Entry]) -> str:
        """The ids of jobs, one word."""
        return "".join(read_command(entry.message).id for entry in entries)

    def slots(self) -> dict[str, str]:
        return _texts(self.client.hgetall(self.keys.slots))

    def taken(self) -> dict[str, str]:
        return _texts(self.client.hgetall(self.keys.slot_counts))

    def held(self) -> dict[str, str]:
        return _texts(self.client.hgetall(self.keys.limited_counts))

    def room(self) -> list[str]:
        """The keys of the waiting room, but for those that go by themselves."""
        pattern = self.keys.waiting_list_prefix.replace("{", "[{]") + "*"
        return [key.decode() for key in self.client.scan_iter(match=pattern) if self.client.pttl(key) == -1]

    def is_empty(self) -> bool:
        """Whether nothing of a gate is left."""
        return not (self.slots() or self.taken() or self.held() or self.room())


def _texts(raw: Any) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in raw.items()}
