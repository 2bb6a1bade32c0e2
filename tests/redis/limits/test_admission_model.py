"""Admission in Lua against a small model in Python: who may run, who waits, and whose turn it is, in random states."""

from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import pytest
import redis
from hypothesis import example, given, settings
from hypothesis import strategies as st

from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.calls import limits
from celery5.broker.calls.jobs import Entry
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import Keys
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.protocol.job.messages import Command, read_command
from celery5.protocol.limits import AdmissionRule
from tests.gate_leaks import gate_leaks
from tests.night import examples
from tests.redis.limits.limited_jobs import TASK, Gated, message
from tests.watched import watched

WORKERS = ("w1", "w2")
RULES = st.builds(
    AdmissionRule,
    st.just(TASK),
    max_running=st.none() | st.integers(1, 3),
    per=st.sampled_from(("all", "worker")),
    keyed=st.booleans(),
    fair=st.booleans(),
)
APPS = count()


class Send(NamedTuple):
    """Jobs come and ask to run, in one call."""

    worker: str
    jobs: list[tuple[str, str]]  # concurrency key and fair key of each


class Pull(NamedTuple):
    """A worker has capacity for waiting jobs."""

    worker: str
    want: int


class End(NamedTuple):
    """A running job ends, and its worker has capacity for waiting jobs."""

    choice: int
    want: int


NAMES = st.sampled_from(("", "ann", "bob"))
STEPS = st.lists(
    st.builds(Send, st.sampled_from(WORKERS), st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=5))
    | st.builds(Pull, st.sampled_from(WORKERS), st.integers(1, 4))
    | st.builds(End, st.integers(0, 99), st.sampled_from((0, 0, 1, 4))),
    min_size=6,
    max_size=14,
)


class AdmissionModel:
    """What `admission.lua` decides. A job runs while its limit has a slot and nobody waits in its list."""

    def __init__(self, rule: AdmissionRule) -> None:
        self.rule = rule
        self.taken: Counter[tuple[str, str]] = Counter()
        # By fair key and concurrency key: jobs by age. Without a list when none waits.
        self.lists: dict[tuple[str, str], list[str]] = {}
        # Fair keys in turn, where there are no concurrency keys.
        self.turns: list[str] = []

    def limit_of(self, token: str, worker: str) -> tuple[str, str]:
        """Return what is counted together."""
        return token, worker if self.rule.per == "worker" else ""

    def is_free(self, token: str, worker: str) -> bool:
        """Return whether a slot is free."""
        most = self.rule.max_running
        return most is None or self.taken[self.limit_of(token, worker)] < most

    def list_of(self, command: Command) -> tuple[str, str]:
        """Return the list that a job waits in: fair key and concurrency key, as far as the rule knows them."""
        return command.fair_key if self.rule.fair else "", command.concurrency_key if self.rule.keyed else ""

    def ask(self, worker: str, commands: list[Command]) -> list[int]:
        """Return for each job whether it runs or waits."""
        outcomes: list[int] = []
        for command in commands:
            name = self.list_of(command)
            runs = name not in self.lists and self.is_free(name[1], worker)
            outcomes.append(limits.ADMITTED if runs else limits.WAITING)
            if runs:
                self.taken[self.limit_of(name[1], worker)] += 1
            else:
                self.lists.setdefault(name, []).append(command.id)
                if name[0] not in self.turns:
                    self.turns.append(name[0])
        return outcomes

    def check_admitted(self, worker: str, commands: list[Command], want: int) -> None:
        """Check which waiting jobs a worker was given: none too many, none too few, and each in its turn."""
        for command in commands:
            fair, token = name = self.list_of(command)
            assert self.is_free(token, worker), "no slot is free"
            assert self.lists[name].pop(0) == command.id, "another one waits for longer in this list"
            self.taken[self.limit_of(token, worker)] += 1
            if not self.rule.keyed:
                assert self.turns[0] == fair, "it is another one's turn"
                self.turns.append(self.turns.pop(0))
            if not self.lists[name]:
                del self.lists[name]
                if not self.rule.keyed:
                    self.turns.remove(fair)
        might_run = [name for name in self.lists if self.is_free(name[1], worker)]
        assert len(commands) == want or not might_run, (
            "one waits though a slot is free and the worker has capacity"
        )

    def end(self, worker: str, command: Command) -> None:
        """A job has ended: its slot is free."""
        self.taken[self.limit_of(self.list_of(command)[1], worker)] -= 1


class Play:
    """The scripts and the model, side by side."""

    def __init__(self, gated: Gated, rule: AdmissionRule) -> None:
        self.gated = gated
        gated.rule = rule
        self.model = AdmissionModel(rule)
        self.running: list[tuple[str, Entry]] = []
        self.numbers = count()
        for worker in WORKERS:
            gated.join(worker)

    def make(self, step: Send | Pull | End) -> None:
        """Make one step in both."""
        match step:
            case Send(worker, jobs):
                named = [(f"j{next(self.numbers)}", *job) for job in jobs]
                messages = [(job_id, message(job_id, token, fair)) for job_id, token, fair in named]
                self.gated(jobs_calls.publish(self.gated.keys, messages))
                entries = self.gated.read(worker)
                outcomes = self.gated.ask(worker, entries)
                assert outcomes == self.model.ask(worker, commands_of(entries))
                ran = [entry for entry, outcome in zip(entries, outcomes, strict=True) if outcome == 1]
                self.running += [(worker, entry) for entry in ran]
            case Pull(worker, want):
                self.note(worker, self.gated.pull(worker, want), want)
            case End(choice, want) if self.running:
                worker, entry = self.running.pop(choice % len(self.running))
                self.model.end(worker, read_command(entry.message))
                self.note(worker, self.gated.done(worker, entry, want=want), want)
            case _:
                pass

    def note(self, worker: str, entries: list[Entry], want: int) -> None:
        """A worker was given waiting jobs."""
        self.model.check_admitted(worker, commands_of(entries), want)
        self.running += [(worker, entry) for entry in entries]


def commands_of(entries: list[Entry]) -> list[Command]:
    """Return what the entries carry."""
    return [read_command(entry.message) for entry in entries]


@pytest.fixture(scope="module")
def shared(server: EmbeddedServer) -> Iterator[tuple[BlockingRedis, "redis.Redis"]]:
    """A driver and a client for all examples."""
    driver = BlockingRedis(Endpoint.from_url(server.url))
    with watched(server), redis.Redis.from_url(server.url) as client:
        yield driver, client
    driver.close()


@settings(max_examples=examples(30))
@given(RULES, STEPS)
@example(
    AdmissionRule(TASK, max_running=2, fair=True),
    [Send("w1", [("", "ann")] * 4 + [("", "bob")]), End(0, 0), End(0, 0), Pull("w1", 2)],
)
def test_admission_decides_in_lua_as_its_model_in_python_does(
    shared: tuple[BlockingRedis, "redis.Redis"], rule: AdmissionRule, steps: list[Send | Pull | End]
) -> None:
    driver, client = shared
    play = Play(Gated(driver, Keys(f"admission-model-{next(APPS)}").for_queue("mail"), client), rule)
    try:
        for step in steps:
            play.make(step)
        assert gate_leaks(client, play.gated.keys) == []
    finally:
        if keys := list(
            client.scan_iter(match=play.gated.keys.stream.removesuffix("stream").replace("{", "[{]") + "*")
        ):
            client.delete(*keys)
