"""Every action of the API is in the audit trail. Methods are found by looking, so that a new one is not forgotten."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis

import celery5
from celery5 import App, AsyncResult, arevoke, revoke
from celery5.errors import CeleryError
from celery5.protocol.audit import ACTIONS, is_action
from celery5.streams import Stream
from celery5.workflows.run import WorkflowRun


@dataclass(frozen=True)
class Call:
    """A call of the API that is an action, and its name in the trail."""

    action: str
    owner: Callable[[App], Any]
    method: str
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.action} {self.method}"


def app_itself(app: App) -> App:
    return app


def a_job(app: App) -> AsyncResult[Any]:
    return app.result("nobody", queue="default")


def a_run(app: App) -> WorkflowRun[Any]:
    return WorkflowRun(app, "night-1", home="default")


ORDERS = ("orders", "books")
CALLS = [
    Call("queue:purge", app_itself, "empty", ("default",)),
    Call("task:revoke", a_job, "revoke"),
    Call("dlq:replay", lambda app: app.dlq, "replay"),
    Call("dlq:purge", lambda app: app.dlq, "purge"),
    Call("task:limit", lambda app: app.limits, "set", ("t", 3)),
    Call("task:limit", lambda app: app.limits, "lift", ("t",)),
    Call("task:limit", lambda app: app.limits, "set_kind_rate", ("thread", "200/m")),
    Call("task:limit", lambda app: app.limits, "lift_kind_rate", ("thread",)),
    Call("task:suspend", lambda app: app.limits, "suspend", ("t",)),
    Call("task:resume", lambda app: app.limits, "resume", ("t",)),
    Call("schedule:pause", lambda app: app.schedule, "pause", ("nightly",)),
    Call("schedule:resume", lambda app: app.schedule, "resume", ("nightly",)),
    Call("schedule:trigger", lambda app: app.schedule, "trigger", ("nightly",)),
    Call("schedule:remove", lambda app: app.schedule, "remove", ("nightly",)),
    Call("event:unsubscribe", lambda app: app.events, "unsubscribe", ("Paid", "t")),
    Call("event:resubscribe", lambda app: app.events, "resubscribe", ("Paid", "t")),
    Call("stream:seek", lambda app: app.streams, "seek", (*ORDERS, "earliest")),
    Call("stream:reset", lambda app: app.streams, "reset", ORDERS),
    Call("stream:reset", lambda app: app.streams, "forget", ORDERS),
    Call("stream:quarantine", lambda app: app.streams, "set_quarantine", (*ORDERS, 0, "a test")),
    Call("stream:reshard", lambda app: app.streams, "reshard", ("orders", 3)),
    Call("stream:release", lambda app: app.streams.parked_keys, "release", ORDERS),
    Call("stream:release", lambda app: app.streams.parked_keys, "discard", ORDERS),
    Call("dlq:replay", lambda app: app.streams.dead_records, "replay", ORDERS),
    Call("dlq:purge", lambda app: app.streams.dead_records, "purge", ORDERS),
    Call("workflow:cancel", a_run, "cancel"),
    Call("workflow:retry", a_run, "retry"),
    Call("workflow:signal", a_run, "signal", ("go",)),
    Call(
        "worker:set-log-level",
        lambda app: app.control,
        "send",
        ("set-log-level",),
        {"to": "w", "timeout": 0.01},
    ),
    Call("worker:run", lambda app: app.control, "run", (), {"to": "w", "timeout": 0.01}),
    Call("schedule:add", lambda app: app.schedule, "add", (), {"name": "weekly"}),
]
"""The actions, each by one method in plain Python, and one of the same name with an `a` before it."""

NO_ACTIONS = {
    "App": "find info result signature check_message_size close configure dispatch load perform processor queue "
    "redirect read_configuration reload_configuration send_jobs send_many stream use_broker use_config workflow",
    "AsyncResult": "forget get outcome progress status",
    "Audit": "acting_as list",
    "Control": "ping workers",
    "DeadLetters": "count read",
    "DeadRecords": "read",
    "Events": "add group_subscriptions list_queues make_event send state versions waiting",
    "Limits": "list rule",
    "ParkedKeyRegistry": "read",
    "Schedules": "list list_declared schedulers show",
    "Stream": "append encode find_partition make_append send send_many subscribe subscribe_check",
    "Streams": "declare declare_processor info parse_processors read subscribe subscribe_check",
    "WorkflowRun": "get graph results status",
    # The last line is what workers call.
    "Workflows": "check_event declare find list_runs resolve start start_declared "
    "apply launch revoke_jobs revoke_members unwatch watch",
}
"""Methods that are no actions: they read, declare, send, or change only what this process has."""


def owners() -> list[type]:
    """The classes of the API: those that are reached through the application, and the handles."""
    found: set[type] = {App, AsyncResult, WorkflowRun, Stream}
    for module in pkgutil.walk_packages(celery5.__path__, "celery5."):
        if module.name.startswith(
            ("celery5.services", "celery5.bootsteps", "celery5.examples", "celery5.__main__")
        ):
            continue
        for value in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(value) and value.__module__ == module.name and "REACHED_AS" in vars(value):
                found.add(value)
    return sorted(found, key=lambda owner: owner.__name__)


def methods(owner: type) -> set[str]:
    """The public methods of a class, without the twins for event loops."""
    names = {
        name for name, value in vars(owner).items() if not name.startswith("_") and inspect.isfunction(value)
    }
    return {name for name in names if not (name.startswith("a") and name[1:] in names)}


def test_every_method_of_the_api_is_an_action_or_is_known_to_be_none(app: App) -> None:
    prepare(app)
    acting = {(type(call.owner(app)).__name__, call.method) for call in CALLS}
    harmless = {(owner, name) for owner, names in NO_ACTIONS.items() for name in names.split()}
    found = {(owner.__name__, name) for owner in owners() for name in methods(owner)}
    assert found == acting | harmless
    assert not acting & harmless


def test_each_action_of_the_vocabulary_is_one_of_a_method() -> None:
    assert {call.action for call in CALLS if call.action in ACTIONS} == set(ACTIONS)
    assert all(is_action(call.action) for call in CALLS)
    assert not is_action("queue:explode")


def prepare(app: App) -> App:
    """Declare a task and a stream."""

    @app.task(name="t")
    async def task() -> None: ...

    app.stream("orders", partitions=1)
    return app


@pytest.fixture(autouse=True)
def _lifted(app: App, redis_client: "redis.Redis") -> Iterator[None]:
    """Limits and suspensions stay until somebody lifts them."""
    yield
    redis_client.delete(app.keys.limits, app.keys.suspended)


def arguments(app: App, call: Call) -> tuple[Any, ...]:
    """The arguments of a call: some take a call of a task."""
    if call.method == "add":
        return (app.tasks["t"].s(), 3600.0)
    return (app.tasks["t"].s(),) if call.method == "run" else call.args


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_each_is_in_the_trail_with_its_outcome(app: App, call: Call) -> None:
    prepare(app).tasks["t"].delay()
    app.schedule.add(app.tasks["t"].s(), 3600.0, name="nightly")
    app.workflows.start(app.tasks["t"].s() >> app.tasks["t"].s(), id="night-1")
    before = {entry.id for entry in app.audit.list()}
    failed = False
    try:
        getattr(call.owner(app), call.method)(*arguments(app, call), **call.options)
    except CeleryError:
        failed = True
    (entry,) = [entry for entry in app.audit.list() if entry.id not in before]
    assert (entry.action, entry.source, entry.job) == (call.action, "python", "")
    assert (
        entry.outcome.startswith("failed: ") if failed else entry.outcome.startswith(("done", "failed: w: "))
    )
    assert "@" in entry.who
    assert entry.target


@pytest.mark.parametrize("call", CALLS, ids=str)
async def test_each_is_in_the_trail_also_from_an_event_loop(app: App, call: Call) -> None:
    await prepare(app).tasks["t"].adelay()
    await app.schedule.aadd(app.tasks["t"].s(), 3600.0, name="nightly")
    await app.workflows.astart(app.tasks["t"].s() >> app.tasks["t"].s(), id="night-1")
    before = {entry.id for entry in await app.audit.alist()}
    with suppress(CeleryError):
        await getattr(call.owner(app), f"a{call.method}")(*arguments(app, call), **call.options)
    (entry,) = [entry for entry in await app.audit.alist() if entry.id not in before]
    assert (entry.action, entry.source) == (call.action, "python")


async def test_many_jobs_are_revoked_in_one_entry(app: App) -> None:
    task = prepare(app).tasks["t"]
    sent = await app.asend_many([task.s() for _ in range(30)])
    assert all(await arevoke(sent))
    (entry,) = await app.audit.alist()
    assert (entry.action, entry.count, entry.filter) == ("task:revoke", 30, {"queue": ["default"]})
    assert entry.target.startswith(f"{sent[0].id}, ")
    assert entry.target.endswith(" and 10 more")


def test_revoking_nothing_is_no_action(app: App) -> None:
    assert revoke([]) == []
    assert app.audit.list() == []
