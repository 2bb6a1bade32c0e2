"""Roles follow from effects: what continues or repeats the work of another operation needs the role of that one."""

from typing import Any

import pytest

from celery5 import App
from celery5.broker.calls.bulk import claim_action
from celery5.operations.bulk import CONTINUED
from celery5.operations.operation import ROLES, Effect
from celery5.operations.table import OPERATIONS
from celery5.protocol.bulk import BulkProgress, BulkRequest, encode_action
from tests.redis.dashboard.client import looking_at
from tests.redis.worker.workers import until_async

ON_JOBS = {"worker:run", "worker:revoke", "queue:pause", "queue:resume"}
"""What is sent to workers, and acts on jobs or on a queue."""


def test_what_acts_on_processes_is_for_admins() -> None:
    acting = {
        name
        for name, operation in OPERATIONS.items()
        if operation.noun in ("worker", "controller") and operation.is_change and name not in ON_JOBS
    }
    assert {
        f"worker:{verb}" for verb in ("set-log-level", "concurrency", "prefetch", "budget", "reload")
    } <= acting
    assert [name for name in acting if OPERATIONS[name].role != "admin"] == []


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("bulk:revoke", "queue:purge"),  # all jobs that a filter selects
        ("worker:revoke", "task:revoke"),
        ("worker:run", "task:send"),
        ("schedule:trigger", "task:send"),
        ("schedule:add", "task:send"),
        ("stream:tail", "worker:stack"),  # confidential values
        ("bulk:retry", "workflow:retry"),
        ("dlq:replay-records", "stream:send"),
        ("dlq:purge-records", "dlq:purge"),
    ],
)
def test_an_operation_has_the_effects_of_one_that_it_repeats(name: str, like: str) -> None:
    assert OPERATIONS[like].effect in OPERATIONS[name].effect


def test_operations_with_all_effects_of_another_need_its_role_at_least() -> None:
    too_low = [
        (operation.name, other.name)
        for operation in OPERATIONS.values()
        for other in OPERATIONS.values()
        if other.effect in operation.effect and ROLES.index(operation.role) < ROLES.index(other.role)
    ]
    assert too_low == []
    assert (Effect.SEND_JOBS | Effect.CONTROL).role == "admin"
    assert (Effect.SEND_JOBS | Effect.AT_ONCE).access == "danger"


def test_whoever_may_destroy_or_control_is_an_admin() -> None:
    assert {operation.effect.role for operation in OPERATIONS.values() if operation.access == "danger"} == {
        "operator",
        "admin",
    }
    assert {effect for effect in Effect if effect.allows("viewer")} == {Effect.SEE}
    assert {effect for effect in Effect if not effect.allows("operator")} == {
        Effect.CONTROL,
        Effect.END_PROCESSES,
        Effect.REVOKE_SELECTED,
        Effect.DELETE,
        Effect.MOVE_GROUPS,
    }


async def interrupt(app: App, verb: Any, **words: Any) -> None:
    """A bulk action of somebody else, whose process has died."""
    fields = encode_action(BulkRequest(verb=verb, filter=words), "root", "cli", BulkProgress())
    await app.aperform(claim_action(app.keys, "a1", "gone", fields, lease=0.01))

    async def is_interrupted() -> bool:
        status = await app.bulk.aget("a1")
        return status is not None and status.state == "interrupted"

    await until_async(is_interrupted)


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("dlq:purge", {"queue": "mail"}),
        ("dlq:replay", {"queue": "mail"}),
        ("task:revoke", {"queue": "mail"}),
        ("workflow:retry", {}),
    ],
)
@pytest.mark.parametrize("role", ["operator", "admin"])
async def test_an_action_is_resumed_by_whoever_might_begin_it(
    app: App, role: Any, verb: Any, words: dict[str, Any]
) -> None:
    await interrupt(app, verb, **words)
    may = OPERATIONS[CONTINUED[verb]].allows(role)
    async with looking_at(app, role=role) as client:
        text = await client.press("bulk:resume", id="a1", status=200 if may else 403)
    assert may or "for admins" in text
    trail = [(entry.who, entry.target) for entry in await app.audit.alist(action="bulk:resume")]
    assert trail == ([("anna", "a1")] if may else [])
