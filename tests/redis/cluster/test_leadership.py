"""Leadership: several Controllers as real processes that are killed, frozen, ended and cut off."""

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import redis
import trio
import trio.testing

from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import Keys
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.broker.timing import Timing
from celery5.logs.log import Log
from celery5.protocol.cluster.leadership import EPOCH_VARIABLE, LEASE
from celery5.services.controller.leadership import Leadership
from tests.faults.connections.proxy import FaultyProxy
from tests.forking import Process, start_process
from tests.redis.commands.staff import wait_until

LIMIT = 60.0
"""Seconds for what takes 4 on a machine that has the time."""


class Note(NamedTuple):
    """One line of the history."""

    at: float
    name: str
    epoch: int
    what: str


class Contest:
    """Contenders over one application, and the history that they write."""

    def __init__(self, app: str, url: str, folder: Path) -> None:
        self.app, self.url, self.folder = app, url, folder
        self.history = folder / "history"
        self.history.touch()
        self.all: dict[str, Process] = {}

    def start(self, name: str, *, url: str = "") -> None:
        """Start one; gives back when it is up."""
        words = [
            sys.executable,
            "-m",
            "tests.redis.connections.contender",
            self.app,
            url or self.url,
            name,
            str(self.history),
        ]
        with (self.folder / name).open("wb") as output:
            self.all[name] = start_process(
                words, cwd=Path.cwd(), env=os.environ, stdout=output, stderr=output
            )
        wait_until(lambda: any(note.name == name for note in self.notes()), within=LIMIT)

    def send(self, name: str, number: signal.Signals) -> None:
        """Send it a signal."""
        self.all[name].send_signal(number)

    def notes(self, what: str = "") -> list[Note]:
        """The history so far."""
        found = []
        for line in self.history.read_text().splitlines():
            at, name, epoch, did = line.split()
            if what in ("", did):
                found.append(Note(float(at), name, int(epoch), did))
        return sorted(found)

    def reigns(self) -> list[tuple[str, int, float, float]]:
        """Who acted one after another: name, epoch, and its first and its last act in that epoch. Fails when two have
        acted in one epoch, or one while another did."""
        acts = self.notes("act")
        epochs: dict[int, set[str]] = {}
        for act in acts:
            epochs.setdefault(act.epoch, set()).add(act.name)
        assert all(len(names) == 1 for names in epochs.values()), epochs
        runs = [(key, list(of_it)) for key, of_it in groupby(acts, lambda act: (act.name, act.epoch))]
        assert len(runs) == len(epochs), "two acted at once"
        assert all(a[0][1] < b[0][1] for a, b in pairwise(runs)), "an epoch came after a later one"
        return [(*key, of_it[0].at, of_it[-1].at) for key, of_it in runs]

    def wait_for(self, *names: str) -> None:
        """Wait until these, and no others, have led one after another."""
        wait_until(lambda: [reign[0] for reign in self.reigns()] == list(names), within=LIMIT)


@contextmanager
def contest(app: str, url: str, folder: Path) -> Iterator[Contest]:
    """A contest whose processes end with the block."""
    one = Contest(app, url, folder)
    try:
        yield one
    finally:
        for process in one.all.values():
            process.kill()
            process.wait(30)


@pytest.fixture
def held(app_name: str, url: str, tmp_path: Path) -> Iterator[Contest]:
    """A contest over the shared server."""
    with contest(app_name, url, tmp_path) as one:
        yield one


def test_when_the_leader_is_killed_another_one_acts_in_less_than_5_s(held: Contest) -> None:
    held.start("a")
    held.start("b")
    held.wait_for("a")
    held.send("a", signal.SIGKILL)
    held.wait_for("a", "b")
    held.start("c")
    held.send("b", signal.SIGKILL)
    held.wait_for("a", "b", "c")
    gaps = [begin - end for (*_, end), (*_, begin, _) in pairwise(held.reigns())]
    assert min(gaps) < 5  # the machine may be busy


def test_a_frozen_leader_is_replaced_and_finds_out_when_it_goes_on(held: Contest) -> None:
    held.start("a")
    held.start("b")
    held.wait_for("a")
    held.send("a", signal.SIGSTOP)
    held.wait_for("a", "b")
    held.send("a", signal.SIGCONT)
    wait_until(lambda: bool(held.notes("lost")), within=LIMIT)
    assert held.notes("lost")[0].name == "a"
    held.send("b", signal.SIGTERM)  # and stands by
    held.wait_for("a", "b", "a")


def test_after_an_end_in_order_nobody_waits_for_the_lease(held: Contest) -> None:
    held.start("a")
    held.start("b")
    held.wait_for("a")
    held.send("a", signal.SIGTERM)
    held.wait_for("a", "b")
    assert held.all["a"].wait(LIMIT) == 0
    (*_, ended), (*_, begun, _) = held.reigns()
    assert begun - ended < LEASE


async def test_a_leader_that_is_cut_off_stops_acting_before_another_one_begins(
    app_name: str, url: str, server: EmbeddedServer, tmp_path: Path, nursery: trio.Nursery
) -> None:
    proxy = FaultyProxy(str(server.socket))
    await nursery.start(proxy.run)
    aside = trio.to_thread.run_sync
    with contest(app_name, url, tmp_path) as held:
        await aside(lambda: held.start("a", url=proxy.url))
        await aside(held.start, "b")
        await aside(held.wait_for, "a")
        proxy.stall()
        await aside(held.wait_for, "a", "b")
        proxy.resume()
        await aside(lambda: wait_until(lambda: bool(held.notes("lost")), within=LIMIT))
        await aside(held.wait_for, "a", "b")
        proxy.refuse()
        held.send("b", signal.SIGKILL)
        await trio.sleep(LEASE)
        assert [reign[0] for reign in held.reigns()] == ["a", "b"]
        proxy.accept()
        await aside(held.wait_for, "a", "b", "a")
    nursery.cancel_scope.cancel()


def test_whatever_befalls_three_of_them_no_two_act_at_once(held: Contest) -> None:
    chance, count = random.Random(), 3
    for name in ("one", "two", "three"):
        held.start(name)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        name = chance.choice([name for name, process in held.all.items() if process.poll() is None])
        what = chance.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGSTOP, signal.SIGTERM])
        if chance.random() < 0.7:  # most of the time it is the leader's turn
            name = next(
                (note.name for note in reversed(held.notes("act")) if held.all[note.name].poll() is None),
                name,
            )
        held.send(name, what)
        time.sleep(chance.uniform(0, 4))
        if what is signal.SIGSTOP:
            held.send(name, signal.SIGCONT)
        else:
            held.start(f"n{count}")
            count += 1
        held.reigns()
    assert len(held.reigns()) > 1


# ---- in the test's own run


async def note_change(leadership: Leadership, name: str, heard: list[str]) -> None:
    """Add `name` to `heard` when the lead begins or ends."""
    await leadership.wait_changed()
    heard.append(name)


async def test_a_leader_says_what_it_is(
    app_name: str, url: str, redis_client: "redis.Redis", nursery: trio.Nursery
) -> None:
    link = TrioRedis(endpoint=Endpoint.from_url(url), timing=Timing(), watch=lambda _event: None)
    await nursery.start(link.run)
    clock = {"a": 1000.0, "b": 5.0}  # no two clocks need show the same

    def of(name: str) -> Leadership:
        log = Log(worker=name, app=app_name)
        return Leadership(redis=link, keys=Keys(app_name), worker=name, log=log, clock=lambda: clock[name])

    first, second = of("a"), of("b")
    await nursery.start(first.run)
    await nursery.start(second.run)
    epoch = first.epoch
    assert (first.is_leader, first.has_valid_lease, second.is_leader, second.has_valid_lease) == (
        True,
        True,
        False,
        False,
    )
    assert second.record.leader == first.record.leader == "a"
    assert (first.status_line, second.status_line) == ("", "stands by: a leads")
    assert first.get_epoch_environment() == {EPOCH_VARIABLE: str(epoch)}
    assert first.conditions() == second.conditions() == {"leadership": ""}
    assert [family.samples[0].value for family in first.metric_families()] == [1, epoch]
    clock["a"] += LEASE  # nothing was heard for so long
    assert (first.is_leader, first.has_valid_lease) == (True, False)
    assert first.conditions()["leadership"].startswith("it cannot tell")
    await first.refresh()
    assert first.has_valid_lease
    redis_client.delete(Keys(app_name).leader)
    await first.refresh()
    await second.refresh()
    assert (first.epoch, second.epoch) == (epoch, 0)
    heard: list[str] = []
    nursery.start_soon(note_change, first, "a", heard)
    nursery.start_soon(note_change, second, "b", heard)
    await trio.testing.wait_all_tasks_blocked()
    await first.resign()
    assert not first.is_leader
    assert first.status_line == "leads no more, and ends: another Controller takes over, if one stands by"
    await second.refresh()
    assert second.epoch > epoch
    await first.refresh()  # what has ended does not come back
    await trio.testing.wait_all_tasks_blocked()
    assert (first.epoch, heard) == (0, ["a", "b"])
    nursery.cancel_scope.cancel()
