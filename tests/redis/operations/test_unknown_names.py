"""Each operation refuses a name that nothing has, with a similar one, and says of a dry run what would be done."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import HTTPConnection

from celery5 import App, every
from celery5.dashboard.performing import describe_problem
from celery5.operations.operation import DRY_RUN, Changed, NotFound, Operation
from celery5.operations.parameters import list_parameters
from celery5.operations.table import OPERATIONS
from tests.redis.worker.workers import working

MISSPELT = {"queue": "tlil", "task": "shop.pya", "schedule": "nihgtly", "alert": "oldest-jbo"}
"""A wrong name by the parameter that has it; one that is called `name` is that of the operation's noun."""
MEANT = {"queue": "till", "task": "shop.pay", "schedule": "nightly", "alert": "oldest-job"}
OTHERS: dict[str, dict[str, Any]] = {
    "task:limit": {"limit": "3"},
    "worker:run": {"to": "one"},
    "schedule:add": {"name": "another", "every": 60.0},
    "schedule:change": {"every": 60.0},
}
"""Other parameters that an operation needs."""
ACCEPTING = {
    "alert:unsilence",  # a silence may outlive its alert
    "event:unsubscribe",  # it looks for the event first
    "event:resubscribe",  # it looks for the subscription
    "task:resume",  # see below: what is suspended may outlive its task
}
"""Operations that take any name."""
NOTHING_THERE: dict[str, dict[str, Any]] = {
    "dlq:replay-records": {"stream": "orders", "group": "bill"},
    "dlq:purge-records": {"stream": "orders", "group": "bill"},
}
"""Operations with a dry run that need a stream, which has tests of its own."""


def find_subject(operation: Operation) -> tuple[str, str]:
    """The required parameter that names a queue, a task, a schedule or an alert, and which of these it is."""
    for parameter in list_parameters(operation.parameters):
        thing = operation.noun if parameter.name == "name" else parameter.name
        is_new = (operation.name, parameter.name) == ("schedule:add", "name")
        if parameter.required and thing in MISSPELT and not is_new:
            return parameter.name, thing
    return "", ""


def declare(app: App) -> None:
    """A task."""

    @app.task(name="shop.pay", queue="till")
    async def pay() -> None: ...


async def test_each_operation_refuses_an_unknown_name_with_a_similar_one(app: App) -> None:
    declare(app)
    await app.schedule.aadd(app.tasks["shop.pay"].s(), every(3600), name="nightly")
    wrong: dict[str, object] = {}
    looked_at = 0
    async with working(app, name="one"):
        await app.tasks["shop.pay"].options(countdown=600).adelay()
        for name, operation in OPERATIONS.items():
            parameter, thing = find_subject(operation)
            if not parameter or name in ACCEPTING:
                continue
            looked_at += 1
            raw = {parameter: MISSPELT[thing], **OTHERS.get(name, {})}
            try:
                wrong[name] = await operation.perform(app, operation.parse(raw, is_text=False))
            except Exception as error:
                connection = cast("HTTPConnection", SimpleNamespace(scope={}))
                problem = describe_problem(error, connection)
                if problem.status != 404 or f"; did you mean {MEANT[thing]!r}?" not in problem.detail:
                    wrong[name] = problem
    assert wrong == {}
    assert looked_at >= 14


async def test_a_task_in_the_place_of_a_job_is_told_apart_from_an_unknown_id(app: App) -> None:
    declare(app)
    show = OPERATIONS["task:show"]
    for wrong, said in (
        ("shop.pay", "'shop.pay' is a task, not the id of a job"),
        ("nope", "it was never sent"),
    ):
        with pytest.raises(NotFound, match=said):
            await show.perform(app, show.parse({"id": wrong}, is_text=False))


async def test_each_operation_says_of_a_dry_run_what_would_be_done(app: App) -> None:
    declare(app)
    job = await app.tasks["shop.pay"].adelay()
    wrong: dict[str, object] = {}
    looked_at = 0
    for name, operation in OPERATIONS.items():
        parameters = {parameter.name: parameter for parameter in list_parameters(operation.parameters)}
        if "dry_run" not in parameters or name in NOTHING_THERE:
            continue
        looked_at += 1
        given: dict[str, Any] = {"queue": "till", "ids": [job.id]}
        raw = {name: given[name] for name, parameter in parameters.items() if parameter.required}
        changed: Changed = await operation.perform(
            app, operation.parse({**raw, "dry_run": True}, is_text=False)
        )
        if not (changed.dry_run and changed.summary.startswith(DRY_RUN)):
            wrong[name] = changed
    assert wrong == {}
    assert looked_at >= 5
