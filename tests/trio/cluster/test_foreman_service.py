"""Foreman service: it performs what was decided over any platform, and ends with everybody ended."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from celery5.errors import CommandRefused, Misconfigured, PlatformError
from celery5.logs.log import Log, NullLog
from celery5.platform import Beat, Cluster, Ended, Member, MemberEvent, Platform, Ready, State, Stopping
from celery5.processes.platform_factory import make_platform
from celery5.protocol.cluster.description import parse_cluster
from celery5.protocol.cluster.foreman import ClusterState
from celery5.protocol.cluster.leadership import LeaderRecord
from celery5.protocol.cluster.members import MemberEnd, Permit, Phase
from celery5.protocol.health.worker_status import Attempts, format_worker_status
from celery5.protocol.process.recycling import IS_SPARE, SUPERVISED_VARIABLE
from celery5.protocol.scaling.autoscale import Autoscale
from celery5.services.controller.foreman import ClusterReady, Foreman
from celery5.services.controller.foreman_commands import ForemanCommands
from celery5.services.controller.sub_processes import SubProcesses, describe_exit
from celery5.services.process.reloader import ReloadSignal

CLUSTER = parse_cluster({"workers": {"default": {"count": 2}}, "schedulers": {"default": {}}})


class Stage(Platform):
    """A platform whose members are names on a list. Those that are `broken` cannot be started."""

    def __init__(self, *, cluster: Cluster = CLUSTER, app: str = "") -> None:
        self.cluster, self.app = cluster, app
        self.there: dict[str, Member] = {}
        self.did: list[tuple[str, str]] = []
        self.broken: set[str] = set()
        self.quick = True
        self.lasting = False
        self.before: dict[str, State] = {}
        self.heard: Callable[[MemberEvent], None] = lambda _: None

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
                heard(Beat(name, f"{name} is well"))

    async def start(self, member: Member) -> None:
        assert member.name not in self.there
        await trio.sleep(0.01)
        if member.name in self.broken:
            raise PlatformError("there is no room")
        self.there[member.name] = member
        self.did.append(("start", member.name))
        if self.quick:
            self.heard(Ready(member.name))

    async def stop(self, name: str) -> None:
        self.did.append(("stop", name))
        self.heard(Stopping(name))
        self.end(name, 0)

    async def kill(self, name: str) -> None:
        self.did.append(("kill", name))
        self.end(name, -9)

    async def reload(self, name: str) -> None:
        self.did.append(("reload", name))

    async def living(self) -> Mapping[str, State]:
        return self.before

    def outlives(self, _name: str) -> bool:
        return self.lasting

    def stays(self, _name: str) -> bool:
        return self.lasting

    def end(self, name: str, code: int) -> None:
        self.there.pop(name, None)
        self.heard(Ended(name, describe_exit(code), code))


@dataclass
class Line:
    """Whether Redis can be reached."""

    connected: bool = True


@dataclass
class Lead:
    """Whether this Controller is the one that acts."""

    has_valid_lease: bool = True
    is_leader: bool = True
    status_line: str = ""
    resigned: int = 0
    changed: trio.Event = field(default_factory=trio.Event)
    record = LeaderRecord(7, 1, "c")

    def get_epoch_environment(self) -> Mapping[str, str]:
        return {"EPOCH": "7"}

    async def wait_changed(self) -> None:
        await self.changed.wait()

    async def resign(self) -> None:
        await trio.lowlevel.checkpoint()
        self.resigned += 1

    def become(self, *, leads: bool, sure: bool) -> None:
        """Another standing."""
        self.is_leader, self.has_valid_lease, self.status_line = (
            leads,
            sure,
            "" if leads else "stands by: b leads",
        )
        self.notify()

    def notify(self) -> None:
        """Wake the Foreman."""
        self.changed.set()
        self.changed = trio.Event()


@dataclass
class House:
    """A Foreman, what it acts upon, and what it tells."""

    stage: Stage = field(default_factory=Stage)
    line: Line = field(default_factory=Line)
    lead: Lead = field(default_factory=Lead)
    told: list[str] = field(default_factory=list)
    cluster: Cluster = CLUSTER
    configuration: object = None
    bell: ReloadSignal = field(default_factory=ReloadSignal)
    log: Log = field(default_factory=NullLog)

    def __post_init__(self) -> None:
        self.foreman = Foreman(
            cluster=self.cluster,
            cluster_state=ClusterState(self.cluster, random=lambda: 0.5),
            platform=self.stage,
            leader=self.lead,
            redis=self.line,
            member_environment={"CELERY5_APP": "shop"},
            grace_period=5.0,
            capacity="",
            log=self.log,
            on_status=self.told.append,
        )

    @asynccontextmanager
    async def open(self) -> AsyncGenerator["House", None]:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.foreman.run)
            with trio.fail_after(5):
                await self.foreman.all_ready.wait()
            yield self
            nursery.cancel_scope.cancel()

    def commands(
        self, says: Callable[[], Cluster] = lambda: CLUSTER, scaled: bool = False
    ) -> ForemanCommands:
        limits = Autoscale(minimum=1, maximum=4) if scaled else None
        return ForemanCommands(
            foreman=self.foreman,
            leader=self.lead,
            load_cluster=says,
            autoscale=limits,
            configuration=self.configuration,
            reload_signal=self.bell,
            log=NullLog(),
        )


async def test_all_members_are_started_with_their_surroundings_and_ended_in_order(
    autojump_clock: MockClock,
) -> None:
    async with House().open() as house:
        assert house.told[-1] == "3 of 3 members up"
        environment = house.stage.there["worker-default-1"].environment
        assert environment == {"CELERY5_APP": "shop", "CELERY5_WORKER_GROUP": "default", "EPOCH": "7"}
    assert house.stage.there == {}
    ended = [name for what, name in house.stage.did if what == "stop"]
    assert ended[0] == "scheduler-default-1"
    assert sorted(ended[1:]) == ["worker-default-1", "worker-default-2"]


async def test_members_that_stay_go_on_when_their_controller_is_asked_to_end(
    autojump_clock: MockClock,
) -> None:
    house = House()
    house.stage.lasting = True
    async with house.open():
        pass
    assert len(house.stage.there) == 3
    assert not [name for what, name in house.stage.did if what != "start"]
    assert house.lead.resigned == 1, "another Controller may lead at once"


async def test_who_dies_is_started_again(autojump_clock: MockClock) -> None:
    async with House().open() as house:
        house.stage.end("worker-default-1", -9)
        assert house.foreman.conditions()["cluster"].startswith("worker-default-1: ended by SIGKILL")
        await trio.sleep(1)
        assert house.stage.did.count(("start", "worker-default-1")) == 2
        assert house.foreman.conditions() == {"cluster": ""}


async def test_what_cannot_be_started_is_tried_again_and_holds_up_nobody(autojump_clock: MockClock) -> None:
    house = House()
    house.stage.broken.add("worker-default-1")
    async with trio.open_nursery() as nursery:
        await nursery.start(house.foreman.run)
        await trio.sleep(1)
        assert sorted(house.stage.there) == ["scheduler-default-1", "worker-default-2"]
        assert "there is no room" in house.foreman.cluster_state.problem
        assert not house.foreman.all_ready.is_set()
        house.stage.broken.clear()
        await house.foreman.all_ready.wait()
        nursery.cancel_scope.cancel()


async def test_while_redis_is_away_no_death_counts(autojump_clock: MockClock) -> None:
    async with House().open() as house:
        house.line.connected = False
        for _ in range(30):
            house.stage.end("worker-default-1", 1)
            await trio.sleep(15)
        assert house.foreman.cluster_state.members["worker-default-1"].phase is Phase.UP


async def test_what_runs_already_is_not_started_again(autojump_clock: MockClock) -> None:
    house = House()
    house.stage.before = {"worker-default-1": "up", "scheduler-default-1": "up"}
    house.stage.there = {name: Member(name=name, kind="worker", arguments=()) for name in house.stage.before}
    async with house.open():
        assert house.stage.did == [("start", "worker-default-2")]


async def test_who_does_not_lead_ends_its_members_and_starts_none(autojump_clock: MockClock) -> None:
    async with House().open() as house:
        house.lead.become(leads=False, sure=False)
        await trio.sleep(3)
        assert house.stage.there == {}
        house.lead.become(leads=True, sure=True)
        await trio.sleep(3)
        assert len(house.stage.there) == 3


async def test_a_platform_that_crashes_ends_the_foreman(autojump_clock: MockClock) -> None:
    class Bad(Stage):
        async def start(self, member: Member) -> None:
            raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        await House(stage=Bad()).foreman.run()
    assert caught.group_contains(ZeroDivisionError)


async def test_members_that_do_not_end_hold_up_the_end_for_a_while_only(autojump_clock: MockClock) -> None:
    class Deaf(Stage):
        async def stop(self, name: str) -> None:
            self.did.append(("stop", name))

        async def kill(self, name: str) -> None:
            self.did.append(("kill", name))

    began = trio.current_time()
    async with House(stage=Deaf()).open() as house:
        pass
    assert ("kill", "scheduler-default-1") in house.stage.did
    assert 100 < trio.current_time() - began <= 55 * 2 + 20 + 5


async def test_the_gate_opens_when_all_are_up(autojump_clock: MockClock) -> None:
    house = House()
    house.stage.quick = False
    async with trio.open_nursery() as nursery:
        await nursery.start(house.foreman.run)
        with trio.move_on_after(0.5) as waited:
            await ClusterReady(foreman=house.foreman).run()
        assert waited.cancelled_caught
        await nursery.start(ClusterReady(foreman=house.foreman).run)
        assert house.foreman.cluster_state.is_complete
        nursery.cancel_scope.cancel()


async def test_it_scales_within_the_limits_of_the_autoscaler(autojump_clock: MockClock) -> None:
    async with House().open() as house:
        scale = house.commands(scaled=True).handlers["scale"]
        answer = await scale({"workers": 2, "of": 3})
        assert answer == {"workers": 3, "groups": {"worker-default": 3}, "change": 1}
        await trio.sleep(1)
        assert len(house.stage.there) == 4
        for workers, limited, change in ((100, 4, 2), (0, 1, 3)):
            answer = await scale({"workers": workers})
            assert answer == {"workers": limited, "groups": {"worker-default": limited}, "change": change}
        await trio.sleep(3)
        assert sorted(house.stage.there) == ["scheduler-default-1", "worker-default-1"]
        for wrong in ("2", -1, None, True, 1.5):
            with pytest.raises(CommandRefused):
                await scale({"workers": wrong})


async def test_a_scale_outlives_another_description() -> None:
    async with House().open() as house:
        commands = house.commands(lambda: parse_cluster({"workers": {"default": {"count": 2}}}))
        await commands.handlers["scale"]({"workers": 3})
        nothing: dict[str, object] = {"started": [], "restarted": [], "settings": [], "change": 2}
        assert await commands.reload() == {**nothing, "stopped": ["scheduler-default-1"]}
        with trio.fail_after(10):
            while len(house.stage.there) != 3 or "scheduler-default-1" in house.stage.there:
                await trio.sleep(0.01)


async def test_a_description_that_is_wrong_changes_nothing() -> None:
    def wrong() -> Cluster:
        raise Misconfigured("workers.a.cuont is not known")

    async with House().open() as house:
        with pytest.raises(CommandRefused, match="the old description stays: workers"):
            await house.commands(wrong).reload()
        with pytest.raises(CommandRefused, match="needs a Controller that is started again"):
            await house.commands(lambda: Cluster(platform="systemd")).reload()
        assert len(house.stage.there) == 3


async def test_members_that_go_on_read_their_configuration_again() -> None:
    async with House(configuration="shop.settings").open() as house:
        other = parse_cluster(
            {"workers": {"default": {"count": 2}}, "schedulers": {"default": {"inbox": False}}}
        )
        commands = house.commands(lambda: other)
        async with trio.open_nursery() as nursery:
            await nursery.start(commands.run)
            house.bell.send()  # and a thread reads the description: no clock may jump meanwhile
            with trio.fail_after(30):
                while len(house.stage.did) < 3 + 2 + 2:  # three have started; two look, and one begins again
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        told = [name for what, name in house.stage.did if what == "reload"]
        assert sorted(told) == ["worker-default-1", "worker-default-2"]
        assert ("stop", "scheduler-default-1") in house.stage.did


async def test_it_tells_how_members_are_and_restarts_those_that_are_named(autojump_clock: MockClock) -> None:
    async with House().open() as house:
        handlers = house.commands().handlers
        await trio.sleep(2)
        told = await handlers["members"]({})
        assert isinstance(told, dict)
        assert (told["whole"], told["line"]) == (True, "3 of 3 members up")
        assert told["members"][1]["status"] == "worker-default-1 is well"
        assert await handlers["restart"]({"members": ["worker-default-2"]}) == {
            "restarted": ("worker-default-2",),
            "change": 1,
        }
        await trio.sleep(4)
        assert [name for what, name in house.stage.did if what == "stop"] == [
            *("worker-default-2", "worker-default-3")
        ]
        for names in (["nobody"], [], "worker-default-1"):
            with pytest.raises(CommandRefused):
                await handlers["restart"]({"members": names})


def test_a_platform_of_ones_own_is_named_in_the_description() -> None:
    own = make_platform(Cluster(platform=f"{__name__}:Stage"), "shop", {})
    assert isinstance(own, Stage)
    assert (own.app, isinstance(own, Platform)) == ("shop", True)
    assert isinstance(make_platform(Cluster(platform="processes"), "shop", {}), SubProcesses)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("kubernets", "is not known: auto, kubernetes, processes"),
        ("no.such.module:Class", "ModuleNotFoundError"),
        ("trio:NoSuch", "has no class NoSuch"),
        ("builtins:int", "it is called with cluster and app"),
        ("builtins:dict", "is not a subclass of celery5.platform.Platform"),
    ],
)
def test_a_platform_that_is_none_is_told_of(name: str, wrong: str) -> None:
    with pytest.raises(Misconfigured, match=wrong):
        make_platform(Cluster(platform=name), "shop", {})


async def test_successor_that_cannot_start_is_logged_once_and_tried_again(
    autojump_clock: MockClock,
) -> None:
    events = list[tuple[str, dict[str, Any]]]()

    class Noted(NullLog):
        def event(self, name: str, level: str = "info", /, **fields: Any) -> None:
            events.append((name, fields))

    log = Noted()
    async with House(log=log).open() as house:
        house.stage.broken.add("worker-default-3")
        status = format_worker_status("", 9, Attempts(9), 0, successor="it has done 9 jobs")
        with trio.move_on_after(60):
            while True:
                house.stage.heard(Beat("worker-default-1", status))
                await trio.sleep(1)
        failures = [fields for name, fields in events if name == "member:successor-failed"]
        assert [(fields["name"], fields["successor"]) for fields in failures] == [
            ("worker-default-1", "worker-default-3")
        ]
        starts = [fields["name"] for name, fields in events if name == "member:start-requested"]
        assert starts.count("worker-default-3") >= 4
        house.stage.broken.clear()
        with trio.fail_after(60):
            while await house.foreman.permits.receive() != Permit("worker-default-1", True):
                house.stage.heard(Beat("worker-default-1", status))
        assert house.stage.there["worker-default-3"].environment[SUPERVISED_VARIABLE] == IS_SPARE
        assert SUPERVISED_VARIABLE not in house.stage.there["worker-default-1"].environment


async def test_the_end_of_a_successor_that_was_never_up_is_not_that_of_the_one_before(
    autojump_clock: MockClock,
) -> None:
    name, found = "worker-default-1", list[MemberEnd]()
    async with House().open() as house:

        async def read_ends() -> list[MemberEnd]:
            await trio.sleep(0.1)  # before the platform's first heartbeat, at 1 s
            found.clear()
            with suppress(trio.WouldBlock):
                while True:
                    found.append(house.foreman.member_ends.receive_nowait())
            return found

        house.stage.heard(Ready(name, "", f"{name}:first"))
        house.stage.quick = False
        house.stage.end(name, -9)
        first = MemberEnd(name, "ended by SIGKILL", "it is started again", f"{name}:first")
        assert await read_ends() == [first]
        house.stage.end(name, 1)
        assert await read_ends() == [first]
        house.stage.heard(Ready(name, "", f"{name}:third"))
        (last,) = await read_ends()
        assert (last.how, last.worker) == (first.how, first.worker)
        assert last.then == "started again"
        house.foreman.restart([name])
        await trio.sleep(0.05)
        house.stage.heard(Ready("worker-default-3"))
        await trio.sleep(0.05)
        house.stage.end(name, 1)
        assert await read_ends() == [], "it was never up, and the one before has ended in order"


async def test_missing_members_are_counted_in_the_metrics_by_group(autojump_clock: MockClock) -> None:
    def count(house: House) -> dict[str, float]:
        (family,) = [
            family for family in house.foreman.metric_families() if family.name == "celery5_members_missing"
        ]
        return {
            f"{sample.labels['kind']}-{sample.labels['group']}": sample.value for sample in family.samples
        }

    async with House().open() as house:
        await trio.sleep(2)
        assert count(house) == {"scheduler-default": 0, "worker-default": 0}
        house.stage.broken.add("worker-default-1")
        house.stage.end("worker-default-1", 1)
        await trio.sleep(60)
        assert count(house) == {"scheduler-default": 0, "worker-default": 1}
