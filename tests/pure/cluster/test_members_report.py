"""Missing members: who should work and does not, since when, why, and what a person can do about it."""

import pytest

from celery5.protocol.cluster.description import parse_cluster
from celery5.protocol.cluster.members import Beat, Ended, Ready, format_failure_status
from celery5.protocol.cluster.members_report import MISSING_AFTER, make_report
from celery5.protocol.process.missing import (
    BY_HAND,
    SHOWN_REASON,
    GroupReport,
    MembersReport,
    MissingMember,
    StartAdvice,
    list_missing,
    list_missing_lines,
    make_start_advice,
)
from tests.pure.cluster.test_foreman import Clock

CLUSTER = parse_cluster(
    {"restart_limit": 3, "workers": {"mail": {"count": 2}}, "schedulers": {"default": {}}}
)
NAME = "scheduler-default-1"
RETRY = f"correct what ends it, then: celery5 controller restart {NAME}"


def report(clock: Clock) -> MembersReport:
    """What the Controller says; its clock began at 1,000,000 seconds since 1970."""
    return make_report(clock.crew.members.values(), clock.now, epoch=1e6)


def give_up(clock: Clock, name: str = NAME) -> None:
    """Its processes die until nobody starts it any more."""
    for _ in range(3):
        clock.say(Ended(name, "ended with 1: ImportError: no prices", 1))
        clock.tick(1)


def test_member_is_missing_as_soon_as_it_is_given_up() -> None:
    clock = Clock(CLUSTER).up()
    assert report(clock) == MembersReport(
        groups=(
            GroupReport(kind="scheduler", name="default", declared=1),
            GroupReport(kind="worker", name="mail", declared=2),
        )
    )
    give_up(clock)
    found = report(clock)
    (member,) = found.missing
    assert (member.name, member.condition, member.since) == (NAME, "given up", 1e6 + 100)
    assert member.remedy == RETRY
    assert member.describe(1e6 + 400) == (
        f"{NAME} is given up, and has been down for 5 min: it has died 3 times within 300 s: "
        "ended with 1: ImportError: no prices"
    )
    assert [(group.subject, group.missing) for group in found.groups] == [
        ("group scheduler-default", 1),
        ("group worker-mail", 0),
    ]


def test_member_stays_missing_until_it_works_again() -> None:
    clock = Clock(CLUSTER).up()
    give_up(clock)
    clock.crew.restart([NAME])
    clock.tick(MISSING_AFTER)
    (member,) = report(clock).missing
    assert (member.condition, member.since) == ("down", 1e6 + 100), "a person has it tried again"
    assert "its Controller starts it again by itself" in member.remedy
    clock.say(Ready(NAME))
    assert report(clock).missing == ()


def test_member_that_is_started_again_is_missing_after_a_while() -> None:
    clock = Clock(CLUSTER).up()
    clock.say(Ended("worker-mail-1", "ended by SIGKILL", -9))
    clock.tick(1)
    assert report(clock).missing == ()
    others = ["worker-mail-2", NAME]
    clock.wait(MISSING_AFTER, beats=others)
    (member,) = report(clock).missing
    assert member.describe(1e6 + clock.now) == "worker-mail-1 has been down for 31 s: ended by SIGKILL"
    assert [group.missing for group in report(clock).groups] == [0, 1]


def test_restarts_in_order_and_first_starts_are_not_missing() -> None:
    clock = Clock(CLUSTER)
    clock.tick()
    clock.wait(MISSING_AFTER + 5)
    assert report(clock).missing == ()
    clock.say(*map(Ready, clock.crew.members))
    clock.crew.restart(["worker-mail-1"])
    clock.try_beside("worker-mail-3").tick()
    clock.say(Ended("worker-mail-1", "ended with 0", 0))
    clock.wait(MISSING_AFTER + 5, beats=["worker-mail-2", "worker-mail-3", NAME])
    assert report(clock).missing == ()


def test_additional_member_that_is_given_up_is_missing_and_its_group_is_whole() -> None:
    clock = Clock(CLUSTER).up()
    clock.crew.restart([NAME])
    clock.tick()
    for _ in range(3):
        clock.say(Ended("scheduler-default-2", "ended with 1", 1), *map(Beat, clock.crew.members))
        clock.tick(20)
    found = report(clock)
    assert [member.name for member in found.missing] == ["scheduler-default-2"]
    assert [(group.declared, group.missing) for group in found.groups] == [(1, 0), (2, 0)]


def test_a_long_reason_keeps_its_end_and_shows_where_it_is_cut() -> None:
    why = f"it has died 3 times: {'/srv/release/settings.py ' * 20}: set the setting keys"
    member = MissingMember(kind="worker", name="worker-mail-1", condition="given up", why=why, remedy="")
    assert len(member.reason) <= SHOWN_REASON
    assert "..." in member.reason
    assert member.reason.endswith(": set the setting keys")
    status = format_failure_status("no room " * 100 + "set keys")
    assert "..." in status
    assert status.endswith("set keys")


def test_a_report_that_outlives_its_controller_is_no_controller() -> None:
    assert make_start_advice((), GROUPS).format_start("router") == "celery5 router start"
    assert make_start_advice(("one",), GROUPS).is_controlled


def test_schedules_without_a_scheduler_are_said_once() -> None:
    (nobody,) = list_missing(BY_HAND, idle_schedules=2)
    assert nobody.describe(0) == "no Scheduler works: 2 schedules do not fire"
    assert nobody.remedy == "celery5 scheduler start, with the code that declares them"
    assert list_missing(BY_HAND, idle_schedules=0) == ()
    clock = Clock(CLUSTER).up()
    give_up(clock)
    advice = StartAdvice(is_controlled=True, report=report(clock))
    (member,) = list_missing(advice, idle_schedules=1)
    assert member.describe(1e6 + 400).endswith("no prices; 1 schedule does not fire")
    assert list_missing_lines([member], 3, 1e6 + 400)[1:] == [
        f"  {RETRY}",
        "3 more members are missing: celery5 controller status shows all",
    ]


GROUPS = MembersReport(groups=(GroupReport(kind="router", name="default", declared=1),))


@pytest.mark.parametrize(
    ("advice", "kind", "remedy"),
    [
        (BY_HAND, "router", "celery5 router start"),
        (
            StartAdvice(is_controlled=True, report=GROUPS),
            "router",
            "celery5 controller status shows what the Controller does about its routers",
        ),
        (
            StartAdvice(is_controlled=True, report=GROUPS),
            "scheduler",
            "add [schedulers.NAME] to the cluster description if it has none, then: celery5 controller reload",
        ),
        (
            StartAdvice(is_controlled=True),
            "worker",
            "add [workers.NAME] to the cluster description if it has none, then: celery5 controller reload",
        ),
    ],
)
def test_remedy_is_the_command_of_the_controller_where_one_runs(
    advice: StartAdvice, kind: str, remedy: str
) -> None:
    assert advice.format_start(kind) == remedy


def test_many_missing_members_are_counted_and_some_named() -> None:
    clock = Clock(parse_cluster({"restart_limit": 1, "workers": {"mail": {"count": 30}}})).up()
    for name in list(clock.crew.members)[:25]:
        clock.say(Ended(name, "x" * 500, 1))
    found = report(clock)
    assert (len(found.missing), found.further, found.groups[0].missing) == (20, 5, 25)
    assert len(found.missing[0].describe(1e6)) < 300
