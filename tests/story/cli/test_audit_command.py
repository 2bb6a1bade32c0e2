"""Audit: every command that changes something is in the audit trail, and `audit list` shows who did what."""

import json
import time
from collections.abc import Iterator

import msgspec
import pytest
import redis

from celery5.cli.main import cli
from celery5.protocol.audit import ACTIONS, is_action
from celery5.protocol.events.messages import Subscription
from tests.redis.dead_letters.many_dead_letters import add_dead_letters
from tests.story.cli.commands import celery5
from tests.story.cli.test_terminal import leaves
from tests.story.conftest import Desk

GHOST = "--to ghost --timeout 0.2"
AT_ONCE = "--timeout 0.2 --wait 0"
ACTING = {
    "alert silence": ("alert:silence", "no-workers --why test"),
    "alert unsilence": ("alert:unsilence", "no-workers"),
    "bulk revoke": ("task:revoke", "default --yes"),
    "bulk retry": ("workflow:retry", "--workflow night --yes"),
    "controller reload": ("controller:reload", AT_ONCE),
    "controller restart": ("controller:restart", AT_ONCE),
    "controller scale": ("controller:scale", f"--workers 2 --yes {AT_ONCE}"),
    "controller stop": ("controller:stop", AT_ONCE),
    "dlq purge": ("dlq:purge", "--task shop.add --yes"),
    "dlq replay": ("dlq:replay", "--task shop.add"),
    "event resubscribe": ("event:resubscribe", "Paid shop.add"),
    "event unsubscribe": ("event:unsubscribe", "Paid shop.add --yes"),
    "queue purge": ("queue:purge", "default --yes"),
    "schedule add": ("schedule:add", "weekly shop.whose --every 3600"),
    "schedule change": ("schedule:change", "nightly --every 3600"),
    "schedule pause": ("schedule:pause", "nightly"),
    "schedule remove": ("schedule:remove", "nightly --yes"),
    "schedule resume": ("schedule:resume", "nightly"),
    "schedule trigger": ("schedule:trigger", "nightly"),
    "stream quarantine": ("stream:quarantine", "orders books --why test --partition 0"),
    "stream release": ("stream:release", "orders books --all"),
    "stream reset": ("stream:reset", "orders books --to earliest --yes"),
    "stream reshard": ("stream:reshard", "orders 3"),
    "stream seek": ("stream:seek", "orders books --to earliest"),
    "task limit": ("task:limit", "shop.add 3"),
    "task resume": ("task:resume", "shop.add"),
    "task revoke": ("task:revoke", "JOB"),
    "task send": ("task:send", "shop.whose"),
    "task suspend": ("task:suspend", "shop.add --why test"),
    "worker budget": ("worker:budget", f"thread --maximum 2 {GHOST}"),
    "worker concurrency": ("worker:concurrency", f"2 {GHOST}"),
    "queue pause": ("worker:pause-queue", f"default {GHOST}"),
    "worker prefetch": ("worker:prefetch", f"2 {GHOST}"),
    "worker reload": ("worker:reload", GHOST),
    "queue resume": ("worker:resume-queue", f"default {GHOST}"),
    "worker retry-boot-step": ("worker:retry-boot-step", f"x {GHOST}"),
    "worker revoke": ("worker:revoke", f"JOB {GHOST}"),
    "worker run": ("worker:run", f"shop.whose {GHOST}"),
    "worker set-log-level": ("worker:set-log-level", f"info {GHOST}"),
    "worker shutdown": ("worker:shutdown", GHOST),
    "worker tell": ("worker:anything", f"anything {GHOST}"),
    "workflow cancel": ("workflow:cancel", "night-1"),
    "workflow retry": ("workflow:retry", "night-1"),
    "workflow signal": ("workflow:signal", "night-1 go"),
}
"""Each command that changes something, with its action and its arguments."""
CHANGING_NOTHING = {
    "alert unsilence",
    "bulk retry",
    "event resubscribe",
    "stream quarantine",
    "stream release",
    "task resume",
}
"""Those of them that find nothing to change in the application of these tests, so there is no entry."""
TRIED_ELSEWHERE = {
    "bulk resume": "bulk:resume",  # test_bulk_commands.py: it needs an action that was interrupted
    "alert test": "alert:test",  # test_alert_commands.py: it needs a webhook
    "event send": "event:send",  # test_event_commands.py: it needs an event
    "stream send": "stream:send",  # test_stream_commands.py: it needs a stream
}
"""Commands that are actions, and whose test is where what they need is."""
NOT_ACTING = {
    *(
        "alert history",
        "alert list",
        "alert rules",
        "audit list",
        "autoscale status",
        "config check",
        "config show",
        "controller status",
        "dlq count",
        "dlq read",
    ),
    *(
        "acl",
        "doctor",
        "event list",
        "event show",
        "health",
        "info",
        "keys show",
        "queue list",
        "queue show",
        "schedule list",
    ),
    *("dashboard start", "dashboard token", "top", "queue storage", "dlq groups"),
    *("bulk list", "bulk show", "bulk stop"),  # an action has one entry, when it ends
    *("metrics dashboard", "metrics history", "metrics rules", "metrics show"),
    *(
        "schedule show",
        "stream list",
        "stream parked",
        "stream show",
        "stream tail",
        "task limits",
        "task list",
        "task search",
        "task show",
    ),
    *("worker active", "worker health", "worker list", "worker ping", "worker stack", "worker stats"),
    *("workflow graph", "workflow list"),
    "workflow show",  # all of these read
    *(
        "controller start",
        "publisher start",
        "router start",
        "scheduler start",
        "worker start",
        "demo",
    ),  # they serve
    # they change files of this host, or nothing
    *(
        "keys new",
        "keys revoke",
        "keys trust",
        "completion",
        "docs",
        "migrate",
        "systemd install",
        "kubernetes manifests",
    ),
}


def test_every_command_is_an_action_or_is_known_to_be_none() -> None:
    assert set(leaves(cli)) == ACTING.keys() | TRIED_ELSEWHERE.keys() | NOT_ACTING
    assert not ACTING.keys() & NOT_ACTING
    assert all(is_action(action) for action, _ in ACTING.values())
    named = {action for action, _ in ACTING.values()} | set(TRIED_ELSEWHERE.values())
    assert set(ACTIONS) <= named


@pytest.fixture
def stocked(desk: Desk, redis_client: "redis.Redis") -> Iterator[Desk]:
    """An application with something of everything."""
    app, keys = desk.app, desk.app.keys
    add_dead_letters(app, redis_client, "dead", task="shop.add")
    app.schedule.add(app.tasks["shop.whose"].s(), 3600.0, name="nightly")
    app.workflows.start(app.tasks["shop.whose"].s() >> app.tasks["shop.whose"].s(), id="night-1")
    redis_client.zadd(keys.live_processes("controller"), {"ctl:abc": (time.time() + 60) * 1000})
    app.stream("orders", partitions=1).send({"n": 1})
    redis_client.hset(keys.for_stream("orders").groups, "books", "0-0")
    job = app.tasks["shop.add"].s(1, 2).job()
    subscription = Subscription("Paid", (1,), job)
    redis_client.hset(keys.subscriptions, subscription.name, msgspec.json.encode(subscription))
    yield desk
    for key in redis_client.scan_iter(f"celery5:[{{]{app.name}[:}}]*"):
        redis_client.delete(key)


@pytest.mark.parametrize("command", ACTING)
def test_it_is_in_the_trail(stocked: Desk, command: str) -> None:
    app, (action, arguments) = stocked.app, ACTING[command]
    words = arguments.replace("JOB", stocked.app.tasks["shop.add"].delay(1, 2).id).split()
    before = {entry.id for entry in app.audit.list()}
    ended = celery5("-A", "shop", *command.split(), *words, cwd=stocked.folder)
    entries = [entry for entry in app.audit.list() if entry.id not in before]
    expected = [] if command in CHANGING_NOTHING else [(action, "cli")]
    assert [(entry.action, entry.source) for entry in entries] == expected, ended
    assert not entries or entries[0].outcome == "done" or ended.code != 0, ended


def test_people_and_programs_read_who_did_what(desk: Desk) -> None:
    assert desk("audit", "list") == "no actions are recorded\n"
    desk("task", "suspend", "shop.add", "--why", "the bank is closed")
    with desk.app.audit.acting_as("anna", source="dashboard"):
        desk.app.limits.resume("shop.add")
    head, resumed, suspended = desk("audit", "list").splitlines()
    assert head.split() == ["at", "who", "from", "action", "target", "filter", "count", "outcome"]
    assert resumed.split()[2:] == ["anna", "dashboard", "task:resume", "shop.add", "1", "done"]
    assert suspended.split()[3:6] == ["cli", "task:suspend", "shop.add"]
    assert "why=the bank is closed" in suspended
    (told,) = json.loads(
        desk("audit", "list", "--json", "--who", "anna", "--since", "1h", "--action", "task")
    )
    assert abs(told["at"] - time.time()) < 60
    assert (told["who"], told["action"], told["target"]) == ("anna", "task:resume", "shop.add")
    assert (told["filter"], told["count"], told["outcome"], told["job"]) == ({}, 1, "done", "")
    assert json.loads(desk("audit", "list", "--json", "--limit", "1"))[0]["action"] == "task:resume"
    assert "no actions" in desk("audit", "list", "--action", "dlq")


def test_a_misspelt_action_is_refused(desk: Desk) -> None:
    ended = celery5("-A", "shop", "audit", "list", "--action", "dlq:reply", cwd=desk.folder)
    assert ended.code != 0
    assert "did you mean 'dlq:replay'?" in ended.error
