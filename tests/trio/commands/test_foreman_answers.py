"""Foreman Commands: what a Controller answers is what becomes of its members, and how old what it knows is."""

from typing import Any

import trio
from trio.testing import MockClock

from celery5.protocol.cluster.description import Cluster, parse_cluster
from celery5.protocol.cluster.members import Ended, Phase, Ready
from tests.trio.cluster.test_foreman_service import House, Lead


def described(**flags: object) -> Cluster:
    return parse_cluster({"workers": {"default": {"count": 2, **flags}}, "schedulers": {"default": {}}})


async def test_a_reload_lists_who_is_restarted_and_nobody_who_goes_on() -> None:
    said = [described(concurrency=7), described(concurrency=7), described()]
    house = House(cluster=described())
    for name, post in house.foreman.cluster_state.members.items():
        post.phase, post.started_as = Phase.UP, post.member
        if name == "worker-default-2":
            post.phase, post.started_as = Phase.GIVEN_UP, None
    commands = house.commands(lambda: said.pop(0))
    first = {
        "started": ["worker-default-2"],
        "stopped": [],
        "restarted": ["worker-default-1"],
        "settings": [],
        "change": 1,
    }
    assert await commands.reload() == first
    nothing: dict[str, object] = {"started": [], "stopped": [], "restarted": [], "settings": []}
    assert await commands.reload() == {**nothing, "change": 2}, (
        "what the reload before has changed is not changed again"
    )
    third = await commands.reload()
    assert third == {**nothing, "started": ["worker-default-2"], "change": 3}, (
        "the other one runs as it is to be again"
    )


async def test_a_reload_names_what_else_has_changed() -> None:
    changed = parse_cluster({"workers": {"default": {}}, "hung_after": 7, "restart_limit": 2})
    house = House(cluster=parse_cluster({"workers": {"default": {}}}))
    assert (await house.commands(lambda: changed).reload())["settings"] == ["restart_limit", "hung_after"]


async def test_who_stands_by_restarts_nobody_and_says_so() -> None:
    lead = Lead(has_valid_lease=False, is_leader=False, status_line="stands by: b leads")
    async with House(lead=lead, cluster=described()).open() as house:
        reload = house.commands(lambda: described(concurrency=7)).reload
        assert await reload() == {"stands_by": True, "change": 1}


async def test_a_member_is_shown_with_the_code_that_it_has_loaded(autojump_clock: MockClock) -> None:
    async with House().open() as house:
        await trio.sleep(2)
        state = house.foreman.cluster_state

        async def show() -> dict[str, str]:
            told: Any = await house.commands().handlers["members"]({})
            return {
                member["name"]: member["code"] for member in told["members"] if member["kind"] == "worker"
            }

        state.handle_event(Ready("worker-default-1", "/v2/shop.py"), trio.current_time())
        assert await show() == {"worker-default-1": "/v2/shop.py", "worker-default-2": ""}
        state.handle_event(Ended("worker-default-1", "ended by SIGKILL", -9), trio.current_time())
        assert await show() == {"worker-default-1": "", "worker-default-2": ""}


async def test_deaths_restarts_and_the_age_of_words_are_told_apart(autojump_clock: MockClock) -> None:
    async with House().open() as house:
        handlers = house.commands().handlers
        await trio.sleep(2)
        crew = house.foreman.cluster_state
        crew.handle_event(Ended("worker-default-1", "ended by SIGKILL", -9), trio.current_time())
        crew.members["worker-default-2"].status_at = trio.current_time() - 9
        told = await handlers["members"]({})
        assert isinstance(told, dict)
        shown = {member["name"]: member for member in told["members"]}
        assert (shown["worker-default-1"]["deaths"], shown["worker-default-1"]["restarts"]) == (1, 0)
        assert shown["worker-default-1"]["status_age"] is None, "it is gone, and says nothing"
        assert shown["worker-default-2"]["status_age"] == 9
