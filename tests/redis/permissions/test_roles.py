"""Roles: with no more than the ACL that is printed for it, each process does all that it is for."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis
import trio

from celery5 import App, Event, JobState, TaskFailed, agather
from celery5.broker.keys import Keys
from celery5.broker.lua_commands import find_lua_commands, keep_reachable
from celery5.broker.permissions import (
    ROLES,
    find_commands,
    get_commands,
    list_scripts,
    load_scripts,
    make_user,
)
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.dashboard.pages import PAGES
from celery5.errors import BrokerDenied
from celery5.processes.dashboard import DashboardOptions
from celery5.processes.router import ROUTER
from celery5.processes.scheduler import SCHEDULER
from celery5.scheduling import Periodic
from celery5.streams import StreamEvents
from celery5.workflows import Flow
from tests.access import PASSWORD, SPARED
from tests.house.sources import files
from tests.redis.dashboard.serving import serving
from tests.redis.dashboard.site import find_form_key, read_text
from tests.redis.publisher.publishing import publishing
from tests.redis.worker.workers import Lines, start, working
from tests.story.cli.commands import celery5


@pytest.fixture
def users(own_server: EmbeddedServer) -> Iterator[Callable[[str], str]]:
    """Returns the URL of a role of the application `shop`; afterwards nothing was denied to any of them."""
    with redis.Redis.from_url(own_server.url) as admin:

        def make(role: str) -> str:
            user = make_user("shop", role)
            admin.execute_command("ACL", "SETUSER", user.user, f">{PASSWORD}", *user.rules)
            return own_server.url.replace("unix://", f"unix://{user.user}:{PASSWORD}@", 1)

        yield make
        denied = {entry[b"object"].decode() for entry in admin.execute_command("ACL", "LOG")}
        assert denied <= SPARED, "something was denied that it cannot do without"


class Shop:
    """The application of the tests, for one user."""

    def __init__(self, url: str, **options: Any) -> None:
        app = self.app = App("shop", broker=url, lease=2.0, inbox=False, **options)
        self.clicks = clicks = app.stream("clicks", by=lambda record: record["p"], partitions=2)
        self.seen = app.stream("seen", partitions=1)
        self._declare_tasks(app)
        self._declare_limited(app)

        @app.processor(clicks, name="p")
        async def process(events: StreamEvents[Any]) -> None:
            async for record in events.records():
                events.state.set("x", record)
                events.send(record, to=self.seen)

    def _declare_tasks(self, app: App) -> None:
        @app.event
        class Paid(Event):
            n: int

        self.runs: list[int] = []

        @app.task(name="one")
        async def one(n: int) -> int:
            self.runs.append(n)
            return n

        @app.task(name="fails", max_retries=0)
        def fails() -> None:
            raise ValueError("no")

        @app.task(name="again", max_retries=1, backoff=0.01)
        async def again(n: int) -> int:
            if n:
                raise OSError("once")
            return n

        @app.task(name="ticks", schedule=Periodic(0.2), unique_for=0.1)
        async def ticks() -> None: ...

        @app.workflow(name="flow")
        def flow(flow: Flow, n: int) -> Any:
            flow.wait_for("ok", timeout=600)
            return flow.call(one, n)

        Paid.subscribe(one)
        self.Paid, self.one, self.fails, self.again, self.flow = Paid, one, fails, again, flow

    def _declare_limited(self, app: App) -> None:
        @app.task(name="limited", limit=1, concurrency_key="n")
        async def limited(n: int) -> int:
            return n

        @app.task(name="rated", rate_limit="100/s")
        async def rated(n: int) -> int:
            return n

        self.limited, self.rated = limited, rated


async def send_jobs(shop: Shop) -> None:
    sent = [
        await shop.one.adelay(1),
        await shop.one.options(countdown=0.05).adelay(1),
        await shop.one.options(key="k").adelay(1),
        await shop.one.options(unique_for=60).adelay(1),
        await shop.one.options(priority="high").adelay(1),
        await shop.one.options(priority="low", countdown=0.05).adelay(1),
        await shop.limited.adelay(1),
        await shop.rated.adelay(1),
        *await shop.app.asend_many([shop.one.s(1) for _ in range(5)]),
    ]
    assert await agather(sent, timeout=20) == [1] * len(sent)
    assert await sent[0].astatus() is JobState.SUCCESS
    assert [update.result async for update in sent[0].watch()] == [1]
    await shop.Paid.adelay(n=1)
    with pytest.raises(TaskFailed):
        await (await shop.fails.adelay()).aget(20)
    assert await (await shop.again.adelay(0)).aget(20) == 0


async def follow_all(shop: Shop) -> None:
    one, flow = shop.one, shop.flow
    assert await (await one.map(range(300)).astart()).aget(20) == list(range(300))
    assert await (await (one.s(3) | one.s()).astart(id="chained")).aget(20) == 3
    run = await flow.astart(7)
    await run.asignal("ok", 1)
    assert await run.aget(20) == 7
    assert (await run.astatus()).state == "SUCCESS"
    waiting = await flow.astart(8)
    await waiting.acancel()
    await shop.clicks.asend({"p": "a"}, {"p": "b"})
    job = await one.adelay(1)
    await job.aprogress()
    assert await job.aget(20) == 1
    found = await shop.app.afind(job.id)
    assert found is not None
    await job.aforget()
    for task in (one, shop.limited):
        assert await (await task.options(countdown=100).adelay(1)).arevoke()


FEATURES: dict[str, list[Callable[[Shop], Awaitable[None]]]] = {
    "sender": [send_jobs],
    "producer": [send_jobs, follow_all],
}


@pytest.mark.parametrize("role", FEATURES)
async def test_every_feature_works_under_the_printed_acl(role: str, users: Callable[[str], str]) -> None:
    worker, router, scheduler = (Shop(users(name)) for name in ("worker", "router", "scheduler"))
    producer = Shop(users(role))
    async with trio.open_nursery() as nursery:
        parts = [
            await start(nursery, worker.app, name="w"),
            await start(nursery, router.app, page=ROUTER, name="r"),
            await start(nursery, scheduler.app, page=SCHEDULER, name="s"),
        ]
        for feature in FEATURES[role]:
            await feature(producer)
        for part in parts:
            await part.stop()
    for shop in (worker, router, scheduler, producer):
        shop.app.close()


@pytest.mark.timeout(180)
def test_a_publisher_and_a_controller_with_its_worker_work_under_the_printed_acl(
    users: Callable[[str], str], short_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "aclapp.py").write_text(
        "from celery5 import App\napp = App('shop')\n\n@app.task\nasync def number(n: int) -> int: return n\n"
    )
    command = [sys.executable, "-m", "celery5", "-A", "aclapp", "controller", "start"]
    environ = {**os.environ, "CELERY5_BROKER": users("controller"), "XDG_STATE_HOME": str(tmp_path)}
    with (
        publishing("shop", users("publisher"), short_path) as daemon,
        subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL) as controller,
    ):
        try:
            daemon.start()
            app = App("shop", broker=users("sender"), publisher=f"unix://{daemon.socket}")

            @app.task(name="aclapp.number")
            def number(n: int) -> int:
                return n

            sent = [number.delay(n) for n in range(3)]
            assert [result.get(timeout=90) for result in sent] == [0, 1, 2]
            app.close()
        finally:
            controller.terminate()
        assert controller.wait(60) == 0
        assert daemon.stop() == 0


async def look(app: App) -> None:
    """What a viewer may ask."""
    await app.ainfo()
    await app.metrics.aoverview()
    await app.metrics.asummary()
    await app.metrics.astorage()
    await app.schedule.alist()
    await app.streams.ainfo()
    await app.audit.alist()
    await app.dlq.acount()
    await app.dlq.agroups()
    await app.limits.alist()
    await app.bulk.alist()
    await app.alerts.alist()
    await app.jobs.asearch()


async def operate(app: App) -> None:
    """What an operator may do."""
    await app.dlq.areplay()
    await app.dlq.apurge()
    await app.limits.aset("limited", 3)
    await app.limits.alift("limited")
    await app.aempty("default")


NOBODY = [
    "PUBSUB CHANNELS",
    "FLUSHALL",
    "KEYS *",
    "CONFIG GET *",
    "SCRIPT FLUSH",
    "CLIENT KILL ID 1",
    "ACL LIST",
    "SET other 1",
]
FORBIDDEN = {
    "sender": ["XRANGE {stream} - +", "XREADGROUP GROUP workers x STREAMS {stream} >", "DEL {stream}"],
    "producer": [
        "XREADGROUP GROUP workers x STREAMS {stream} >",
        "XACK {stream} workers 1-1",
        "UNLINK {stream}",
    ],
    "viewer": [
        "DEL {stream}",
        "XADD {stream} * a b",
        "HSET {stream} a b",
        "SET {stream} 1",
        "SADD {stream} 1",
    ],
    "worker": ["SCAN 0"],
}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_permitted_nothing_beyond_its_work(role: str, own_server: EmbeddedServer) -> None:
    user = make_user("shop", role)
    stream = App("shop").queue("default").stream
    with redis.Redis.from_url(own_server.url) as admin:
        admin.execute_command("ACL", "SETUSER", user.user, f">{PASSWORD}", *user.rules)
    url = own_server.url.replace("unix://", f"unix://{user.user}:{PASSWORD}@", 1)
    commands = [
        *NOBODY,
        "GET celery5:{{shop2}}:queues",
        "GET celery5:{{shop2:q}}:jobs",
        *FORBIDDEN.get(role, []),
    ]
    with redis.Redis.from_url(url) as client:
        for command in commands:
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command.format(stream=stream).split())


@pytest.mark.parametrize("role", ROLES)
def test_each_server_takes_users_who_may_use_the_channels_of_a_cluster(
    role: str, own_server: EmbeddedServer
) -> None:
    """`redis://` may lead to a cluster, and 6.2 refuses a user with a command that it does not know."""
    user = make_user("shop", role)
    channel = f"{Keys('shop').patterns[0].removesuffix('*')}news"
    with redis.Redis.from_url(own_server.url) as admin:
        admin.execute_command("ACL", "SETUSER", user.user, f">{PASSWORD}", *user.rules)
        if str(cast("Any", admin).info("server")["redis_version"]).startswith("6."):
            return
    url = own_server.url.replace("unix://", f"unix://{user.user}:{PASSWORD}@", 1)
    with redis.Redis.from_url(url) as client:
        cast("Any", client).pubsub().ssubscribe(channel)
        if role == "viewer":
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command("SPUBLISH", channel, "x")
        else:
            client.execute_command("SPUBLISH", channel, "x")


async def test_a_missing_permission_is_named_also_inside_of_a_script(
    own_server: EmbeddedServer, users: Callable[[str], str]
) -> None:
    sender = Shop(users("sender"))
    with redis.Redis.from_url(own_server.url) as admin:
        admin.execute_command("ACL", "SETUSER", "shop-sender", "-xadd")
        with pytest.raises(
            BrokerDenied, match=r"does not permit XADD in the script publish to the user: .*celery5 acl"
        ) as caught:
            await sender.one.adelay(1)
        assert "\n" not in str(caught.value)
        admin.execute_command("ACL", "SETUSER", "shop-sender", "+xadd", "-evalsha")
        with pytest.raises(BrokerDenied, match="evalsha"):
            await sender.one.adelay(1)
        admin.execute_command("ACL", "SETUSER", "shop-sender", "+evalsha", "resetkeys", "~other")
        with pytest.raises(BrokerDenied, match="key"):
            await sender.one.adelay(1)
        admin.execute_command("ACL", "LOG", "RESET")
    sender.app.close()


def test_the_command_prints_what_redis_takes(own_server: EmbeddedServer, tmp_path: Path) -> None:
    (tmp_path / "aclapp.py").write_text("from celery5 import App\napp = App('odd[1]*')\n")

    def run(*words: str) -> str:
        ended = celery5("-A", "aclapp", "acl", *words, cwd=tmp_path)
        return ended.out or ended.err

    with redis.Redis.from_url(own_server.url) as admin:
        for role in ROLES:
            line = run(role)
            assert line.startswith(f"ACL SETUSER odd[1]*-{role} on >CHANGE-ME resetkeys ")
            assert admin.execute_command(*line.split()) in (b"OK", "OK", True)
        assert json.loads(run("viewer", "--json", "--user", "eve"))["user"] == "eve"
    assert "did you mean 'producer'?" in run("producr")
    assert set(ROLES) <= set(run().split())
    assert run("sentinel").startswith(
        "ACL SETUSER odd[1]*-sentinel on >CHANGE-ME resetkeys resetchannels nocommands"
    )


@pytest.mark.parametrize("role", ["viewer", "operator"])
async def test_what_is_shown_and_done_works_under_the_printed_acl(
    role: str, users: Callable[[str], str]
) -> None:
    worker, person = Shop(users("worker")), Shop(users(role))
    async with working(worker.app):
        await send_jobs(worker)
        await look(person.app)
        if role == "operator":
            await operate(person.app)
    for shop in (worker, person):
        shop.app.close()


@pytest.mark.parametrize("role", ["viewer", "operator"])
async def test_a_dashboard_with_a_secret_works_under_the_printed_acl(
    role: str, users: Callable[[str], str], own_server: EmbeddedServer
) -> None:
    person = Shop(users(role))
    options = DashboardOptions(port=0, secret=PASSWORD * 4)
    with redis.Redis.from_url(own_server.url) as admin:
        async with serving(person.app, options) as served, serving(person.app, options) as other:
            session = await served.sign_in()
            for page in PAGES:
                if "{" not in page.path:
                    assert (await served.get(f"/shop/{page.path}".rstrip("/"), session)).status == 200, page
            assert not {entry[b"object"].decode() for entry in admin.execute_command("ACL", "LOG")} - SPARED
            key = find_form_key((await served.get("/nothing", session)).body)
            answer = await served.post("/sign-out", f"form_key={key}", session)
            assert (await served.get("/api/v1", session)).status == 401
            # A user that only reads cannot tell the other process: whoever signs out is told so.
            is_told = (await other.get("/api/v1", session)).status == 401
            assert is_told == (role == "operator") == (answer.status == 303)
            assert "set-cookie" in answer.head
            assert is_told or "others with its secret cannot be told" in read_text(answer.body)
        admin.execute_command("ACL", "LOG", "RESET")
    person.app.close()


def test_the_table_of_roles_covers_all_that_the_package_sends() -> None:
    operator = set(get_commands("operator"))
    for script in load_scripts().values():
        missing = find_commands(script) - operator
        assert not missing, script.name
    of_workers = {script.name for script in list_scripts("worker")}
    assert set(load_scripts()) - of_workers == {"erase", "probe_permissions"}
    for role in ROLES.values():
        assert set(role.scripts or ()) <= set(load_scripts())


def test_every_command_that_is_sent_without_a_script_is_permitted_to_operators() -> None:
    operator, sources = (
        set(get_commands("operator")),
        [path.read_text() for path in files("celery5/broker/calls")],
    )
    sent = {
        word.lower()
        for text in sources
        for word in re.findall(r'(?:words[^=\n]*= |Call\(\s*)[(\[]\s*"([A-Z]+)"', text)
    }
    sent |= {word.lower() for text in sources for word in re.findall(r'\*\("(X[A-Z]+)"', text)}
    assert len(sent) > 25
    by_subcommand = {name.partition("|")[0] for name in operator}
    assert sent - by_subcommand - {"config"} == set()  # `celery5 doctor` does without CONFIG GET


def test_the_guide_has_the_users_that_are_printed() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guide" / "trust.md").read_text()
    users = re.findall(r"(?m)^ACL SETUSER shop-(\w+) on >CHANGE-ME (.*)$", page)
    assert len(users) >= 4
    for role, rules in users:
        assert rules.split() == list(make_user("shop", role).rules[1:]), f"print `celery5 acl {role}` again"


def test_a_role_gains_what_a_changed_script_needs() -> None:
    assert find_lua_commands("redis.call('XGROUP', 'CREATE', key)\nlater(at, 'HSET', a)") == {
        "xgroup|create",
        "hset",
    }
    reached = keep_reachable(
        "local function unused()\n  redis.call('DEL', a)\nend\nreturn redis.pcall('GET', a)"
    )
    assert find_lua_commands(reached) == {"get"}


@pytest.mark.parametrize("command", ["xreadgroup", "hset", "zadd", "evalsha", "xack", "subscribe", "hget"])
async def test_a_worker_survives_a_permission_that_is_taken_from_it(
    command: str, own_server: EmbeddedServer, users: Callable[[str], str]
) -> None:
    shop, sender = Shop(users("worker")), Shop(users("sender"))
    with redis.Redis.from_url(own_server.url) as admin, Lines() as lines:
        async with working(shop.app, name="w") as worker:
            assert await (await sender.one.adelay(1)).aget(20) == 1
            admin.execute_command("ACL", "SETUSER", "shop-worker", f"-{command}")
            job = await sender.one.adelay(2)
            await trio.sleep(3)
            assert not worker.ended.is_set()
            admin.execute_command("ACL", "SETUSER", "shop-worker", f"+{command}")
            assert await job.aget(20) == 2
            assert not worker.ended.is_set()
        admin.execute_command("ACL", "LOG", "RESET")
        warnings = lines.count("does not permit")
    assert warnings or command == "subscribe", "nothing was said"
    assert command != "xack" or shop.runs == [1, 2], "what has ended is settled, not run again"
    assert warnings < 60, "it spins"
    shop.app.close()
    sender.app.close()
