"""The actions of the API, each with a call of it; and the methods that are none."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import celery5
from celery5 import App, AsyncResult
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
    # Whether the call of the tests changes something: what changes nothing has no entry.
    changes: bool = True

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
    Call("task:revoke", a_job, "revoke", changes=False),
    Call("dlq:replay", lambda app: app.dlq, "replay", changes=False),
    Call("dlq:purge", lambda app: app.dlq, "purge", changes=False),
    Call("task:limit", lambda app: app.limits, "set", ("t", 3)),
    Call("task:limit", lambda app: app.limits, "lift", ("t",), changes=False),
    Call("task:limit", lambda app: app.limits, "set_kind_rate", ("thread", "200/m")),
    Call("task:limit", lambda app: app.limits, "lift_kind_rate", ("thread",), changes=False),
    Call("task:suspend", lambda app: app.limits, "suspend", ("t",)),
    Call("task:resume", lambda app: app.limits, "resume", ("t",), changes=False),
    Call("schedule:change", lambda app: app.schedule, "change", ("nightly", 60)),
    Call("schedule:pause", lambda app: app.schedule, "pause", ("nightly",)),
    Call("schedule:resume", lambda app: app.schedule, "resume", ("nightly",)),
    Call("schedule:trigger", lambda app: app.schedule, "trigger", ("nightly",)),
    Call("schedule:remove", lambda app: app.schedule, "remove", ("nightly",)),
    Call("event:unsubscribe", lambda app: app.events, "unsubscribe", ("Paid", "t"), changes=False),
    Call("event:resubscribe", lambda app: app.events, "resubscribe", ("Paid", "t"), changes=False),
    Call("stream:seek", lambda app: app.streams, "seek", (*ORDERS, "earliest")),
    Call("stream:reset", lambda app: app.streams, "reset", ORDERS),
    Call("stream:reset", lambda app: app.streams, "forget", ORDERS),
    Call(
        "stream:quarantine", lambda app: app.streams, "set_quarantine", (*ORDERS, 0, "a test"), changes=False
    ),
    Call("stream:reshard", lambda app: app.streams, "reshard", ("orders", 3)),
    Call("stream:release", lambda app: app.streams.parked_keys, "release", ORDERS),
    Call("stream:release", lambda app: app.streams.parked_keys, "discard", ORDERS),
    Call("dlq:replay", lambda app: app.streams.dead_records, "replay", ORDERS),
    Call("dlq:purge", lambda app: app.streams.dead_records, "purge", ORDERS),
    Call("alert:silence", lambda app: app.alerts, "silence", ("*", 60.0)),
    Call("alert:unsilence", lambda app: app.alerts, "unsilence", ("*",), changes=False),
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
    Call("alert:test", lambda app: app.audit, "record_sending", ("alert:test", "alert_test_1")),
    Call("event:send", lambda app: app.audit, "record_sending", ("event:send", "Paid")),
    Call("stream:send", lambda app: app.audit, "record_sending", ("stream:send", "orders"), {"count": 7}),
    Call("task:send", lambda app: app.audit, "record_sending", ("task:send", "t")),
]
"""The actions, each by one method in plain Python, and one of the same name with an `a` before it."""

NO_ACTIONS = {
    "Alerts": "history list rules test",
    "App": "add_middleware autodiscover extend_include find info result signature check_message_size close configure "
    "dispatch guard_broker load make_handle perform processor queue redirect read_configuration reload_configuration "
    "send_jobs send_many stream use_broker use_config with_middleware workflow",
    "AsyncResult": "forget get outcome progress status watch",
    "Audit": "acting_as list",
    # A stop is told of in the entry of the action that it stops.
    "Bulk": "count get list stop",
    "Control": "ping stack workers",
    "DeadLetters": "count groups read",
    "DeadRecords": "read",
    "Events": "add group_subscriptions list_queues make_event send state versions waiting",
    "Jobs": "search story",
    "Limits": "list rule",
    "Metrics": "add_outlet history memory overview processes storage summary totals workers",
    "ParkedKeyRegistry": "read",
    "Schedules": "check_configured list list_declared schedulers show",
    "Stream": "append encode find_partition make_append send send_many subscribe subscribe_check",
    "Streams": "declare declare_processor info parse_processors read subscribe subscribe_check",
    # The last one is what bulk actions call, which have their own entry.
    "WorkflowRun": "get graph results status retry_unrecorded",
    # The last line is what workers call.
    "Workflows": "check_event declare find list_runs resolve start start_declared "
    "apply find_lost launch remove_replaced revoke_jobs revoke_members unwatch watch",
}
"""Methods that are no actions: they read, declare, send, or change only what this process has."""


def owners() -> list[type]:
    """The classes of the API: those that are reached through the application, and the handles."""
    found: set[type] = {App, AsyncResult, WorkflowRun, Stream}
    for module in pkgutil.walk_packages(celery5.__path__, "celery5."):
        if module.name.startswith(
            (
                "celery5.services",
                "celery5.bootsteps",
                "celery5.examples",
                "celery5.contrib",
                "celery5.__main__",
            )
        ):
            continue
        for _, value in inspect.getmembers(importlib.import_module(module.name)):
            if inspect.isclass(value) and value.__module__ == module.name and "REACHED_AS" in vars(value):
                found.add(value)
    return sorted(found, key=lambda owner: owner.__name__)


def methods(owner: type) -> set[str]:
    """The public methods of a class, without the twins for event loops."""
    names = {
        name for name, value in vars(owner).items() if not name.startswith("_") and inspect.isfunction(value)
    }
    return {name for name in names if not (name.startswith("a") and name[1:] in names)}


def prepare(app: App) -> App:
    """Declare a task and a stream."""

    @app.task(name="t")
    async def task() -> None: ...

    app.stream("orders", partitions=1)
    return app
