"""Canaries: the Foreman tries a change with one worker, and goes on or takes it back by itself."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from celery5.logs.log import Log, NullLog
from celery5.platform import Beat, Cluster, Member, MemberEvent
from celery5.protocol.cluster.description import parse_cluster
from celery5.protocol.health.worker_status import Attempts, format_worker_status
from tests.trio.cluster.test_foreman_service import House, Stage

CANARY = "worker-default-canary"
OLD = parse_cluster(
    {"canary": 30, "canary_attempts": 10, "workers": {"default": {"count": 2}}, "schedulers": {"default": {}}}
)
GOOD = parse_cluster(
    {"canary": 30, "workers": {"default": {"count": 2, "queues": ["good"]}}, "schedulers": {"default": {}}}
)
BAD = parse_cluster({"canary": 30, "workers": {"default": {"count": 2, "queues": ["bad"]}}})


@dataclass
class Working(Stage):
    """A platform whose workers end ten attempts a second. With `bad` code all of them fail."""

    cluster: Cluster = OLD
    app: str = ""
    disk: str = "good"
    code: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        super().__init__(cluster=self.cluster)
        self.ended: dict[str, int] = {}

    async def live(
        self,
        heard: Callable[[MemberEvent], None],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        self.heard = heard
        task_status.started()
        while True:
            await trio.sleep(1)
            for name in self.there:
                self.ended[name] = self.ended.get(name, 0) + 10
                failed = self.ended[name] if self.code[name] == "bad" else 0
                attempts = Attempts(self.ended[name] - failed, failed)
                heard(Beat(name, format_worker_status("", self.ended[name], attempts, 0)))

    async def start(self, member: Member) -> None:
        self.code[member.name] = "bad" if "bad" in member.arguments else self.disk
        await super().start(member)

    def end(self, name: str, code: int) -> None:
        self.ended.pop(name, None)
        super().end(name, code)


@dataclass
class Noted(NullLog):
    """A log that keeps the names of its events."""

    names: list[str] = field(default_factory=list[str])

    def event(self, name: str, level: str = "info", /, **fields: object) -> None:
        if name.startswith("canary:"):
            self.names.append(name)


def open_house(log: Log | None = None) -> tuple[House, Working]:
    stage = Working()
    return House(stage=stage, cluster=OLD, log=log or NullLog()), stage


async def test_a_bad_description_is_taken_back_after_one_worker(autojump_clock: MockClock) -> None:
    log = Noted()
    house, stage = open_house(log)
    async with house.open():
        before = [*stage.did]
        assert house.foreman.start_canaries(BAD) == (CANARY,)
        await trio.sleep(10)
        assert [*stage.did] == [*before, ("start", CANARY), ("stop", CANARY)]
        assert sorted(stage.there) == ["scheduler-default-1", "worker-default-1", "worker-default-2"]
        assert house.foreman.cluster is OLD
        why = f"{CANARY}: 10 of its 10 attempts failed, 0 of "
        assert house.foreman.rollback_reason.startswith(why)
        assert "3 of 3 members up; the last change was taken back: worker-default-canary: " in house.told[-1]
        assert house.foreman.conditions() == {"cluster": ""}, "the cluster works as before"
        assert house.foreman.is_complete
        stage.end("worker-default-1", -9)
        await trio.sleep(5)
        assert "bad" not in stage.there["worker-default-1"].arguments
    assert log.names == ["canary:started", "canary:failed"]


async def test_a_good_description_follows_when_the_time_of_the_canary_is_over(
    autojump_clock: MockClock,
) -> None:
    log = Noted()
    house, stage = open_house(log)
    async with house.open():
        house.foreman.start_canaries(GOOD)
        await trio.sleep(29)
        assert list(house.foreman.cluster_state.pending_names) == [CANARY]
        assert "good" not in stage.there["worker-default-1"].arguments
        await trio.sleep(10)
        assert house.foreman.cluster is GOOD
        assert not house.foreman.cluster_state.pending_names
        assert sorted(stage.there) == ["scheduler-default-1", "worker-default-1", "worker-default-2"]
        assert "good" in stage.there["worker-default-1"].arguments
    assert log.names == ["canary:started", "canary:passed"]


async def test_a_restart_that_loads_bad_code_ends_with_the_canary(autojump_clock: MockClock) -> None:
    house, stage = open_house()
    async with house.open():
        stage.disk = "bad"
        restart = house.commands().handlers["restart"]
        assert await restart({}) == {"canaries": (CANARY,), "change": 1}
        await trio.sleep(10)
        assert {name: stage.code[name] for name in stage.there if name.startswith("worker")} == {
            "worker-default-1": "good",
            "worker-default-2": "good",
        }
        members = cast("dict[str, Any]", await house.commands().handlers["members"]({}))
        assert members["taken_back"].startswith(f"{CANARY}: 10 of its 10 attempts failed")
        stage.disk = "better"
        await restart({})
        assert house.foreman.rollback_reason == ""
        await trio.sleep(40)
        assert {stage.code[name] for name in stage.there} == {"better"}
        assert CANARY not in stage.there


async def test_members_that_are_named_are_restarted_without_a_canary(autojump_clock: MockClock) -> None:
    house, stage = open_house()
    async with house.open():
        restart = house.commands().handlers["restart"]
        answer = await restart({"members": ["worker-default-1"]})
        assert answer == {"restarted": ("worker-default-1",), "change": 1}
        await trio.sleep(3)
        assert stage.did.count(("start", "worker-default-1")) == 2
        assert CANARY not in dict(stage.did)


async def test_a_canary_that_cannot_be_started_takes_the_change_back(autojump_clock: MockClock) -> None:
    house, stage = open_house()
    async with house.open():
        stage.broken.add(CANARY)
        house.foreman.start_canaries(GOOD)
        await trio.sleep(5)
        assert house.foreman.rollback_reason == f"{CANARY}: there is no room"
        assert CANARY not in house.foreman.cluster_state.members


@pytest.mark.parametrize("cluster", [None, GOOD])
async def test_a_controller_that_no_longer_leads_ends_its_canary(
    autojump_clock: MockClock, cluster: Cluster | None
) -> None:
    house, stage = open_house()
    async with house.open():
        house.foreman.start_canaries(cluster)
        await trio.sleep(5)
        house.lead.become(leads=False, sure=False)
        await trio.sleep(60)
        assert stage.there == {}
        assert house.foreman.cluster is (cluster or OLD), "as any Controller that stands by"
        house.lead.become(leads=True, sure=True)
        await trio.sleep(60)
        assert sorted(stage.there) == ["scheduler-default-1", "worker-default-1", "worker-default-2"]


async def test_a_bad_canary_stops_though_another_worker_is_down(autojump_clock: MockClock) -> None:
    house, stage = open_house()
    async with house.open():
        house.foreman.start_canaries(BAD)
        stage.broken.add("worker-default-1")
        stage.end("worker-default-1", -9)
        await trio.sleep(10)
        assert house.foreman.rollback_reason
        assert sorted(stage.there) == ["scheduler-default-1", "worker-default-2"]


async def test_a_reload_during_the_start_has_the_canary_of_the_new_description(
    autojump_clock: MockClock,
) -> None:
    stage = Working()
    house = House(stage=stage, cluster=parse_cluster({"workers": {"default": {"count": 2}}}))
    stage.quick = False
    async with trio.open_nursery() as nursery:
        await nursery.start(house.foreman.run)
        await trio.sleep(0.5)  # before the platform's first heartbeat, at 1 s
        reload = house.commands(lambda: BAD).handlers["reload"]
        autojump_clock.autojump_threshold = (
            math.inf
        )  # the description is read in a thread, which no jump waits for
        assert await reload({}) == {"canaries": (CANARY,), "change": 1}
        autojump_clock.autojump_threshold = 0
        await trio.sleep(30)
        assert house.foreman.rollback_reason
        assert sorted(stage.there) == ["worker-default-1", "worker-default-2"]
        assert [step for step in stage.did if step[0] != "start"] == [("stop", CANARY)]
        nursery.cancel_scope.cancel()
