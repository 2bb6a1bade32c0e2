"""Every action of the API that changes something is in the audit trail, from plain Python and from an event loop."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis

from celery5 import App, arevoke, revoke
from celery5.errors import CeleryError
from tests.redis.audit.actions import CALLS, Call, prepare


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
    new = [entry for entry in app.audit.list() if entry.id not in before]
    assert len(new) == call.changes
    if not new:
        return
    entry = new[0]
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
    new = [(entry.action, entry.source) for entry in await app.audit.alist() if entry.id not in before]
    assert new == [(call.action, "python")] * call.changes


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
