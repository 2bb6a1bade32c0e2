"""The JSON API: every route as every role, its description, and that it is the vocabulary of the command line."""

from typing import Any, cast

import httpx
import msgspec
import pytest
import redis
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from celery5 import App
from celery5.cli.main import cli
from celery5.dashboard.access import hash_token
from celery5.dashboard.openapi import make_openapi
from celery5.operations.operation import ROLES, Operation
from celery5.operations.table import OPERATIONS
from tests.redis.dashboard.site import browsing
from tests.redis.worker.workers import working
from tests.story.cli.test_terminal import leaves

NOT_OPERATIONS = {
    *("controller start", "publisher start", "router start", "scheduler start", "worker start"),  # they serve
    *("dashboard start", "dashboard token"),
    *("demo", "completion", "docs"),  # of a terminal
    *("metrics rules", "metrics dashboard"),  # files for other programs
    *(
        "keys new",
        "keys show",
        "keys trust",
        "keys revoke",
        "migrate",
        "systemd install",
        "kubernetes manifests",
    ),  # files of this host
    *("config check",),  # of files that are not in force yet
    *("acl",),  # for whoever sets up Redis
    *("health",),  # the exit code of a probe; `worker:health` has the same of each worker
    *("info", "doctor"),  # info:show, doctor:run
}
"""Commands that no page has a button for."""
OTHER_NAMES = {"worker list": "top:show"}
"""Commands whose operation has another name: the same numbers, without asking each worker."""


def test_everything_that_a_command_does_is_an_operation() -> None:
    commands = {command for command in leaves(cli) if command not in NOT_OPERATIONS}
    missing = {
        command
        for command in commands
        if OTHER_NAMES.get(command, command.replace(" ", ":")) not in OPERATIONS
        and f"{command}:show" not in OPERATIONS
    }
    assert missing == set()


def test_only_a_viewer_sees_and_nobody_less_than_an_operator_changes() -> None:
    for operation in OPERATIONS.values():
        assert not (operation.is_change and operation.role == "viewer"), operation.name
        assert operation.summary.endswith("."), operation.name


def test_the_description_is_valid() -> None:
    document = make_openapi("/jobs")
    validate(cast("Any", document))
    assert document["servers"] == [{"url": "/jobs"}]
    assert len(document["paths"]) == len(OPERATIONS)


def required(operation: Operation) -> dict[str, Any]:
    """Values for the parameters that an operation needs."""
    return {
        field.name: [] if "list" in str(field.type) else 0 if "int" in str(field.type) else "none"
        for field in msgspec.structs.fields(operation.parameters)
        if field.required
    }


@pytest.mark.parametrize("role", ["", *ROLES])
async def test_every_route_is_refused_to_lower_roles(app: App, role: str) -> None:
    async with browsing(app, role=role) as client:
        for operation in OPERATIONS.values():
            path = f"/api/v1/{app.name}/{operation.noun}/{operation.verb}"
            may = bool(role) and ROLES.index(cast("Any", role)) >= ROLES.index(operation.role)
            if operation.is_change:
                if may:
                    continue  # what it does is tested where it is done
                answer = await client.post(path, json=required(operation))
                page = await client.post(
                    f"/{app.name}/do/{operation.noun}/{operation.verb}", data=required(operation)
                )
                assert page.status_code == (403 if role else 401)
            else:
                answer = await client.get(path, params=required(operation))
            if not role:
                assert answer.status_code == 401, operation.name
            elif may:
                assert answer.status_code in (200, 400, 404), (operation.name, answer.text)
            else:
                assert answer.status_code == 403, operation.name
    assert await app.audit.alist() == []


async def test_answers_fit_their_description(app: App) -> None:
    document = make_openapi()
    components = {"components": document["components"]}

    @app.task(name="fail", max_retries=0)
    async def fail() -> None: ...

    await fail.adelay()
    async with browsing(app) as client:
        for path, methods in document["paths"].items():
            if "get" not in methods:
                continue
            operation = next(
                candidate
                for candidate in OPERATIONS.values()
                if path.endswith(f"{candidate.noun}/{candidate.verb}")
            )
            if required(operation):
                continue
            answer = await client.get(path.replace("{app}", app.name))
            schema = methods["get"]["responses"]["200"]["content"]["application/json"]["schema"]
            if answer.status_code == 200:
                Draft202012Validator({**schema, **components}).validate(answer.json())
            else:
                assert answer.status_code == 404, (path, answer.text)
                assert answer.json()["detail"]


@pytest.mark.parametrize(
    ("request_", "status", "detail"),
    [
        ({"url": "queue/lists"}, 404, "there is no operation 'queue:lists'; did you mean 'queue:list'?"),
        ({"url": "metrics/history?queu=a"}, 400, "metrics:history has no parameter 'queu'"),
        ({"url": "metrics/history?since=soon"}, 400, "`since`: 'soon' is not a duration: write 30s, 15m"),
        ({"url": "queue/show"}, 400, "queue:show: give queue"),
        ({"url": "queue/show?queue=nothing"}, 404, "no queue 'nothing' here"),
        ({"url": "queue/purge"}, 400, "queue:purge changes something: use POST"),
        ({"url": "queue/purge", "content": "queue=a"}, 400, "send the parameters as a JSON object"),
        ({"url": "queue/purge", "content": "[1]", "json": True}, 400, "the parameters are no JSON object"),
        ({"url": "queue/show?queu=a"}, 400, "queue:show has no parameter 'queu'; did you mean 'queue'?"),
        ({"url": "task/show?id=none"}, 404, "nothing is known of job 'none'"),
        ({"url": "metrics/history?since=1&since=2&step=7"}, 400, "metrics:history: step"),
    ],
)
async def test_what_is_wrong_is_said_in_one_line(
    app: App, request_: dict[str, Any], status: int, detail: str, tmp_path: Any
) -> None:
    from celery5.dashboard import Dashboard, TokenFile

    file = tmp_path / "tokens"
    file.write_text(f"anna admin {hash_token('t')}\n")
    transport = httpx.ASGITransport(app=Dashboard(app, authenticator=TokenFile(file), hosts=["jobs.example"]))
    async with httpx.AsyncClient(transport=transport, base_url="http://jobs.example") as client:
        headers = {"authorization": "Bearer t"}
        if request_.get("json"):
            headers["content-type"] = "application/json"
        path = f"/api/v1/{app.name}/{request_['url']}"
        if "content" in request_:
            answer = await client.post(path, content=request_["content"], headers=headers)
        else:
            answer = await client.get(path, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"].startswith(detail)
    assert "\n" not in answer.json()["detail"]


async def test_a_command_by_the_api_is_done_and_recorded_under_the_users_name(app: App) -> None:
    @app.task(name="mail")
    async def mail() -> None: ...

    async with browsing(app, role="operator") as client:
        headers = {"authorization": "Bearer t", "x-test-script": "1"}
        answer = await client.post(
            f"/api/v1/{app.name}/task/suspend", json={"task": "mail", "why": "too many"}, headers=headers
        )
        assert answer.json()["summary"] == "mail is suspended"
    assert (await app.limits.alist())["mail"].why == "too many"
    (entry,) = await app.audit.alist()
    await app.limits.aresume("mail")
    assert (entry.who, entry.source, entry.action, entry.target) == (
        "anna",
        "dashboard",
        "task:suspend",
        "mail",
    )


@pytest.mark.parametrize(
    ("operation", "parameters"),
    [
        ("dlq:read", {"task": ["a*"] * 51}),
        ("dlq:count", {"error": ["x" * 201]}),
        ("dlq:groups", {"message": "x" * 201}),
        ("task:search", {"task": "x" * 201}),
        ("worker:ping", {"to": ["w" * 201]}),
    ],
)
async def test_a_look_takes_no_more_and_no_longer_conditions_than_it_can_afford(
    app: App, operation: str, parameters: dict[str, Any]
) -> None:
    async with browsing(app, role="viewer") as client:
        answer = await client.get(f"/api/v1/{app.name}/{operation.replace(':', '/')}", params=parameters)
    assert answer.status_code == 400
    assert "length <=" in answer.json()["detail"]


async def test_a_look_at_processes_writes_into_the_inboxes_of_live_ones_alone(
    app: App, redis_client: "redis.Redis"
) -> None:
    @app.task(name="t")
    async def task() -> None: ...

    async with working(app, name="one"), browsing(app, role="viewer") as client:
        for verb in ("ping", "stats", "active", "health"):
            asked = {"to": ["one", "ghost", "phantom:1"]}
            rows = (await client.get(f"/api/v1/{app.name}/worker/{verb}", params=asked)).json()
            assert {row["process"]: row["ok"] for row in rows} == {
                "one": True,
                "ghost": False,
                "phantom:1": False,
            }
            assert "no worker 'ghost' lives; those that do: one" in [row["why"] for row in rows]
        assert not redis_client.keys("*ghost*")
        assert not redis_client.keys("*phantom*")
