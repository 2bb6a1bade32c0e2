"""Leading: the script that keeps one Controller acting, with clocks and delays of the test's own.

Time is a number here: each Controller has its own clock, which begins anywhere and runs a little too fast or too slow;
trips take as long as chance wants, in both directions, are made twice, or are lost; a Controller may freeze between any
two steps. Redis and its script are real. What is counted is who is sure of its lease at one moment, and in which epoch.
"""

import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import redis

from celery5.broker.call import Call
from celery5.broker.calls import cluster
from celery5.broker.driver import BlockingDriver
from celery5.broker.drivers.opening import open_blocking
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import Keys
from celery5.protocol.cluster.leadership import LEASE, NO_RECORD, LeaderRecord, LeadershipState


@pytest.fixture
def driver(url: str) -> Iterator[BlockingDriver]:
    """Plain trips."""
    one = open_blocking(Endpoint.from_url(url))
    yield one
    one.close()


def lead(
    driver: BlockingDriver, keys: Keys, name: str, *, replaces: str = "", epoch: int = 0
) -> LeaderRecord:
    """One trip."""
    return driver.perform(cluster.claim_leadership(keys, name, replaces=replaces, epoch=epoch))


def test_one_leads_and_the_others_see_it(driver: BlockingDriver, app_name: str) -> None:
    keys = Keys(app_name)
    assert driver.perform(cluster.get_leader(keys)) == LeaderRecord()
    first = lead(driver, keys, "a", replaces=NO_RECORD)
    assert (first.leader, first.beat) == ("a", 1)
    assert first.epoch >= first.since * 1000 > 1.7e12
    assert lead(driver, keys, "b", replaces=NO_RECORD) == first
    assert lead(driver, keys, "b") == driver.perform(cluster.get_leader(keys)) == first
    again = lead(driver, keys, "a", epoch=first.epoch)
    assert (again.epoch, again.beat, again.since) == (first.epoch, 2, first.since)


def test_a_repeated_call_has_one_effect(driver: BlockingDriver, app_name: str) -> None:
    keys = Keys(app_name)
    first = lead(driver, keys, "a", replaces=NO_RECORD)
    assert lead(driver, keys, "a", replaces=NO_RECORD).epoch == first.epoch
    driver.perform(cluster.resign_leadership(keys, "a", epoch=first.epoch))
    second = lead(driver, keys, "b")
    assert (second.leader, second.epoch > first.epoch) == ("b", True)
    assert driver.perform(cluster.resign_leadership(keys, "a", epoch=first.epoch)) == second


def test_only_the_record_that_was_read_is_replaced(driver: BlockingDriver, app_name: str) -> None:
    keys = Keys(app_name)
    first = lead(driver, keys, "a", replaces=NO_RECORD)
    renewed = lead(driver, keys, "a", epoch=first.epoch)
    assert lead(driver, keys, "b", replaces=first.version) == renewed
    taken = lead(driver, keys, "b", replaces=renewed.version)
    assert (taken.leader, taken.epoch > first.epoch) == ("b", True)
    assert lead(driver, keys, "a", epoch=first.epoch) == taken


def test_after_an_end_in_order_another_leads_at_once_in_a_new_epoch(
    driver: BlockingDriver, app_name: str
) -> None:
    keys = Keys(app_name)
    first = lead(driver, keys, "a", replaces=NO_RECORD)
    vacant = driver.perform(cluster.resign_leadership(keys, "a", epoch=first.epoch))
    assert (vacant.leader, vacant.epoch) == ("", first.epoch)
    second = lead(driver, keys, "b")
    assert (second.leader, second.epoch > first.epoch) == ("b", True)


def test_leader_is_not_deposed_by_its_record_of_an_earlier_epoch(
    driver: BlockingDriver, app_name: str
) -> None:
    keys = Keys(app_name)
    first = lead(driver, keys, "a", replaces=NO_RECORD)
    driver.perform(cluster.resign_leadership(keys, "a", epoch=first.epoch))
    second = lead(driver, keys, "a")
    assert driver.perform(cluster.resign_leadership(keys, "a", epoch=first.epoch)) == second


def test_the_epoch_grows_when_redis_has_forgotten_everything(
    driver: BlockingDriver, app_name: str, redis_client: "redis.Redis"
) -> None:
    keys = Keys(app_name)
    first = lead(driver, keys, "a", replaces=NO_RECORD)
    redis_client.delete(keys.leader)
    assert lead(driver, keys, "a", replaces=NO_RECORD, epoch=first.epoch).epoch == first.epoch
    redis_client.delete(keys.leader)
    time.sleep(0.002)  # an epoch is a time in ms
    assert lead(driver, keys, "b", replaces=NO_RECORD).epoch > first.epoch
    redis_client.hset(keys.leader, mapping={"epoch": 10**15, "beat": 1, "leader": ""})
    assert lead(driver, keys, "c").epoch == 10**15 + 1


# ---- random trials


@dataclass
class Trip:
    """A call of one Controller under the `name` that it has then, which arrives `at` a time. Its answer comes `back` at
    another, or never."""

    name: str
    call: Call[LeaderRecord]
    asked: float
    at: float
    back: float = math.inf
    record: LeaderRecord | None = None


@dataclass
class Contender:
    """One Controller, whose clock is `offset` off and runs at a `rate` of its own. It is frozen until it `wakes`, and
    makes its next trip `at` a time."""

    standing: LeadershipState
    offset: float
    rate: float
    wakes: float = 0.0
    at: float = 0.0

    def clock(self, time: float) -> float:
        """What its clock shows."""
        return self.offset + self.rate * time


class Trial:
    """Some Controllers over one record, for a while."""

    def __init__(self, driver: BlockingDriver, keys: Keys, seed: int) -> None:
        self.chance = random.Random(seed)
        self.driver, self.keys = driver, keys
        self.time = 0.0
        self.all = [self.contender(name) for name in "abc"[: self.chance.randint(2, 3)]]
        self.trips: list[Trip] = []
        self.epochs: dict[int, str] = {}
        self.together = 0

    def contender(self, name: str) -> Contender:
        """One of them."""
        uniform = self.chance.uniform
        return Contender(LeadershipState(name=name), uniform(0, 1e6), 1 + uniform(-0.04, 0.04))

    def run(self, seconds: float) -> None:
        """Let time go by in small steps."""
        while self.time < seconds:
            self.time += 0.05
            for trip in list(self.trips):
                self.move(trip)
            for member in self.all:
                if self.time >= max(member.at, member.wakes):
                    self.turn(member)
            self.look()

    def turn(self, one: Contender) -> None:
        """It makes a trip; or it freezes, or ends in order and begins again under another name."""
        chance, standing, now = self.chance, one.standing, one.clock(self.time)
        if chance.random() < 0.03:
            one.wakes = self.time + chance.uniform(0, 8)
        elif standing.epoch and chance.random() < 0.02:
            one.standing = LeadershipState(name=standing.name + "'")
            self.send(
                one, standing.name, cluster.resign_leadership(self.keys, standing.name, epoch=standing.epoch)
            )
        else:
            words = {"replaces": standing.get_replaceable_version(now), "epoch": standing.epoch}
            self.send(one, standing.name, cluster.claim_leadership(self.keys, standing.name, **words))  # type: ignore[arg-type]

    def send(self, one: Contender, name: str, call: Call[LeaderRecord]) -> None:
        """The trip begins. Some are slow, some arrive twice, some are never answered."""
        chance, now = self.chance, one.clock(self.time)
        slow = 6.0 if chance.random() < 0.1 else 0.05
        there = self.time + chance.uniform(0, slow)
        back = math.inf if chance.random() < 0.1 else there + chance.uniform(0, slow)
        self.trips.append(Trip(name, call, now, there, back))
        if chance.random() < 0.1:
            self.trips.append(Trip(name, call, now, self.time + chance.uniform(0, 10)))
        one.at = self.time + 1.5  # it does not wait for an answer for longer

    def move(self, trip: Trip) -> None:
        """The trip arrives, and some time its answer does."""
        if trip.record is None and self.time >= trip.at:
            trip.record = self.driver.perform(trip.call)
            if trip.back == math.inf:
                self.trips.remove(trip)
        if trip.record is None or self.time < trip.back:
            return
        one = next((member for member in self.all if member.standing.name == trip.name), None)
        if one is None:
            self.trips.remove(trip)
        elif self.time >= one.wakes:
            self.trips.remove(trip)
            now = one.clock(self.time)
            one.standing, _ = one.standing.apply_record(trip.record, asked_at=trip.asked, now=now)
            one.at = self.time + one.standing.get_poll_delay(now)

    def look(self) -> None:
        """Nobody acts in an epoch of another's, and no two act at once."""
        acting = [
            listed.standing for listed in self.all if listed.standing.has_valid_lease(listed.clock(self.time))
        ]
        self.together += len(acting) > 1
        for member in acting:
            owner = self.epochs.setdefault(member.epoch, member.name)
            assert owner == member.name, f"two acted in epoch {member.epoch}"


@pytest.mark.parametrize("seed", range(20))
def test_no_two_leaders_act_in_one_epoch_or_at_one_time(
    driver: BlockingDriver, app_name: str, seed: int
) -> None:
    trial = Trial(driver, Keys(app_name), seed)
    trial.run(30 * LEASE)
    assert trial.together == 0
    assert len(trial.epochs) > 1, "nothing happened"
