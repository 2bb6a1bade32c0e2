"""Foreman beside others: it acts while it leads and can, and does nothing to what another one may have adopted."""

import pytest
import trio
from trio.testing import MockClock

from celery5.errors import PlatformError
from celery5.logs.log import Level, Log, NullLog
from celery5.platform import State
from tests.trio.cluster.test_foreman_service import House, Lead, Stage


class Lasting(Stage):
    """A platform whose workers go on without a Controller."""

    def outlives(self, name: str) -> bool:
        """Whether this one does."""
        return name.startswith("worker")


def standing_by(stage: Stage | None = None, log: Log | None = None) -> House:
    """A Foreman that does not lead yet."""
    lead = Lead(has_valid_lease=False, is_leader=False, status_line="stands by: b leads")
    return House(stage=stage or Stage(), lead=lead, log=log or NullLog())


async def test_who_stands_by_has_no_members_and_is_whole(autojump_clock: MockClock) -> None:
    async with standing_by().open() as house:
        await trio.sleep(30)
        assert (house.stage.did, house.told) == ([], ["stands by: b leads"])
        assert house.foreman.conditions() == {"cluster": ""}
        assert house.foreman.is_complete


async def test_who_begins_to_lead_adopts_what_runs_and_starts_the_rest(autojump_clock: MockClock) -> None:
    house = standing_by()
    async with house.open():
        house.stage.before = {"worker-default-1": "up"}
        house.lead.become(leads=True, sure=True)
        await trio.sleep(1)
        assert sorted(house.stage.did) == [("start", "scheduler-default-1"), ("start", "worker-default-2")]
        assert house.told[-1] == "3 of 3 members up"


async def test_a_change_of_the_lead_is_acted_on_before_the_next_regular_decision(
    autojump_clock: MockClock,
) -> None:
    async with standing_by().open() as house:
        await trio.sleep(30.2)
        house.lead.become(leads=True, sure=True)
        await trio.sleep(0.5)
        assert ("start", "worker-default-1") in house.stage.did


async def test_a_platform_with_the_six_methods_has_defaults_for_the_others() -> None:
    stage = Stage()
    stage.fence(lambda: True)
    stage.leave()
    assert (stage.outlives("worker-default-1"), stage.pid_of("worker-default-1")) == (False, None)


async def test_a_platform_that_cannot_tell_what_runs_is_told_of_once(autojump_clock: MockClock) -> None:
    class Heard(NullLog):
        def __init__(self) -> None:
            super().__init__()
            self.said: list[str] = []

        def event(self, name: str, _level: Level = "info", /, **_fields: object) -> None:
            self.said.append(name)

    class Mute(Stage):
        asked = 0

        async def living(self) -> dict[str, State]:
            self.asked += 1
            if self.asked < 10:
                raise PlatformError("the bus is gone")
            return {}

    log = Heard()
    house = standing_by(Mute(), log)
    async with house.open():
        house.lead.become(leads=True, sure=True)
        await trio.sleep(30)
        assert len(house.stage.there) == 3
    assert log.said.count("cluster:adopt-failed") == 1


async def test_deposed_leader_ends_its_members_until_it_leads_again(
    autojump_clock: MockClock,
) -> None:
    async with House().open() as house:
        house.lead.become(leads=False, sure=False)
        await trio.sleep(3)
        assert house.stage.there == {}
        assert house.told[-1] == "stands by: b leads"
        house.lead.become(leads=True, sure=True)
        await trio.sleep(3)
        assert len(house.stage.there) == 3


async def test_deposed_leader_leaves_members_that_may_be_adopted(
    autojump_clock: MockClock,
) -> None:
    async with House(stage=Lasting()).open() as house:
        house.lead.become(leads=False, sure=False)
        await trio.sleep(3)
        assert sorted(house.stage.there) == ["worker-default-1", "worker-default-2"]
    assert sorted(house.stage.there) == ["worker-default-1", "worker-default-2"]


async def test_who_is_not_sure_starts_and_ends_nothing_and_does_not_spin(autojump_clock: MockClock) -> None:
    async with House().open() as house:
        house.lead.become(leads=True, sure=False)
        house.stage.end("worker-default-1", -9)
        did = list(house.stage.did)
        await trio.sleep(30)
        assert house.stage.did == did
        house.lead.become(leads=True, sure=True)
        await trio.sleep(3)
        assert "worker-default-1" in house.stage.there


async def test_waiting_decision_is_dropped_by_a_leader_that_is_unsure(
    autojump_clock: MockClock,
) -> None:
    class Slow(Stage):
        """Whoever is to read its configuration takes its time."""

        async def reload(self, name: str) -> None:
            await trio.sleep(10)
            await super().reload(name)

    async with House(stage=Slow()).open() as house, trio.open_nursery() as nursery:
        starts = house.stage.did.count(("start", "worker-default-1"))
        nursery.start_soon(house.foreman.reload_members, ["worker-default-1"])
        await trio.sleep(1)
        house.stage.end("worker-default-1", -9)
        await trio.sleep(3)  # it is decided to start it, when what is done to it now is done
        house.lead.become(leads=True, sure=False)
        await trio.sleep(30)
        assert house.stage.did.count(("start", "worker-default-1")) == starts
        house.lead.become(leads=True, sure=True)
        await trio.sleep(10)
        assert house.stage.did.count(("start", "worker-default-1")) == starts + 1


async def test_ending_controller_waits_for_its_successor(
    autojump_clock: MockClock,
) -> None:
    async with House().open() as house:
        pass
    assert (house.lead.resigned, house.stage.there) == (1, {})
    async with House(stage=Lasting()).open() as house:
        pass
    assert (house.lead.resigned, house.stage.there) == (0, {})


async def test_lead_lost_and_won_again_between_two_looks_begins_again(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Outliving(Stage):
        def outlives(self, _name: str) -> bool:
            return True

    async with House(stage=Outliving()).open() as house:
        stage = house.stage
        stage.there["worker-default-9"] = stage.there["worker-default-1"]  # the other one's
        stage.before = dict.fromkeys(stage.there, "up")
        monkeypatch.setattr(house.lead, "get_epoch_environment", lambda: {"EPOCH": "9"})
        house.lead.notify()
        await trio.sleep(30)
        assert ("stop", "worker-default-9") in stage.did


async def test_a_stop_that_could_not_be_asked_for_is_asked_for_again(autojump_clock: MockClock) -> None:
    class Deaf(Stage):
        """Whoever is to stop cannot be reached at first."""

        refused = 0

        async def stop(self, name: str) -> None:
            if self.refused < 3:
                self.refused += 1
                raise PlatformError("the bus is gone")
            await super().stop(name)

    stage = Deaf()
    async with House(stage=stage).open() as house:
        house.foreman.restart(["worker-default-1"])
        await trio.sleep(60)
        assert ("kill", "worker-default-1") not in stage.did
        assert ("stop", "worker-default-1") in stage.did
        assert stage.did.count(("start", "worker-default-1")) == 2
