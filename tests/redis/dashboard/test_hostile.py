"""What anybody may write into Redis, or send to the dashboard, is answered in one line, and forges nothing."""

from typing import Any

import pytest
import redis

from celery5 import App, Misconfigured
from celery5.commands.control import Reply
from tests.redis.dashboard.client import looking_at
from tests.redis.dashboard.site import browsing, press, read_text
from tests.redis.dashboard.test_pages import until_dead
from tests.redis.worker.workers import working

HIDDEN = "\x9b31m\u202egnp.exe\u2066\x07"
"""C1, bidi and C0 characters."""


async def test_names_cannot_colour_reorder_or_hide_text(app: App) -> None:
    @app.task(name=f"pay{HIDDEN}", max_retries=0)
    async def pay(text: str) -> None:
        raise ValueError(f"no{HIDDEN}")

    sent = await pay.adelay(HIDDEN)
    async with working(app), looking_at(app) as client:
        await until_dead(app, 1)
        for page in ("dead", "dead/jobs", "tasks", "jobs", f"jobs/{sent.id}"):
            html = await client.load(page)
            assert not set(html) & set(HIDDEN.replace("gnp.exe", "").replace("31m", "")), page
            assert "gnp.exe" in html, page
        answer = await client.ask("dlq:read")
        assert answer[0]["args"] == [HIDDEN]
    async with browsing(app) as http:
        raw = await http.get(f"/api/v1/{app.name}/dlq/read")
        assert not set(raw.text) & set("\x9b\u202e\u2066\x07")


@pytest.mark.parametrize(
    "body",
    [
        "[" * 200_000,
        '{"args": ' + "[" * 100_000,
        '{"countdown": ' + "9" * 100_000 + "}",
        "{",
        "\ud800",
        "[1]",
        "null",
    ],
    ids=range(7),
)
async def test_a_body_that_is_no_object_is_refused_in_one_line(app: App, body: str) -> None:
    headers = {"content-type": "application/json", "x-test-script": "1", "authorization": "Bearer x"}
    async with browsing(app, role="operator") as client:
        page = await client.get(f"/{app.name}/jobs")
        headers["x-form-key"] = page.text.partition('name="form_key" value="')[2].partition('"')[0]
        answer = await client.post(
            f"/api/v1/{app.name}/task/send", content=body.encode(errors="surrogatepass"), headers=headers
        )
    assert answer.status_code == 400, answer.text
    assert len(answer.json()["detail"]) < 400


@pytest.mark.parametrize(
    "values",
    [
        {"task": "pay", "args": "[99999999999999999999999999]"},
        {"task": "pay", "args": "[1e400]"},
        {"task": "pay", "args": "[" + "9" * 5000 + "]"},
        {"task": "pay", "args": "[" * 2000 + "]" * 2000},
        {"task": "pay", "args": '["\\ud800"]'},
        {"task": "pay", "args": "[1]", "countdown": "1e400"},
        {"task": "pay", "args": "[1]", "countdown": "9" * 5000},
        {"task": "pay", "args": "[1]", "countdown": "nan"},
        {"task": "pay", "args": "[1]", "key": "k" * 20_000},
        {"task": "pay", "args": "[1]", "queue": "q\x1b"},
    ],
    ids=range(10),
)
async def test_a_job_with_odd_values_is_sent_or_refused_in_one_line(app: App, values: dict[str, str]) -> None:
    @app.task(name="pay")
    async def pay(amount: Any) -> None: ...

    async with browsing(app, role="operator") as client:
        page = await press(client, app, "task:send", values)
    assert page.status_code in (200, 400, 409), read_text(page.text)


async def test_an_answer_of_another_shape_is_shown_as_none(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.task(name="pay")
    async def pay() -> None: ...

    answers: list[Any] = [
        [1],
        "text",
        None,
        {"checks": [{"state": {}}]},
        [{"id": []}],
        {"stacks": [7]},
        2**70,
    ]

    async with working(app, name="one"), looking_at(app, role="operator") as client:
        for answer in answers:

            async def send(command: str, *_: Any, answer: Any = answer, **__: Any) -> list[Reply]:
                return [Reply(worker="one", ok=True, answer=answer)]

            monkeypatch.setattr(app.control, "asend", send)
            for page in ("workers/one", "workers/one?stack=true", "health"):
                await client.load(page)


async def test_a_part_that_cannot_be_read_leaves_the_rest_of_the_page(
    app: App, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("invalid literal for int(): '\x9b'")

    monkeypatch.setattr(type(app.alerts), "alist", fail)
    async with browsing(app) as client:
        shown = await client.get(f"/{app.name}")
        assert shown.status_code == 200
        text = read_text(shown.text)
        assert "the alerts cannot be shown: ValueError: invalid literal for int(): '\\x9b'" in text
        assert "Backlog" in text


@pytest.mark.parametrize("as_json", [False, True])
async def test_unexpected_error_is_one_line_on_the_page_and_an_error_in_the_log(
    app: App, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    async def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("odd")

    monkeypatch.setattr(type(app.schedule), "alist", fail)
    noted: list[str] = []

    def note(path: str, error: Exception) -> None:
        noted.append(f"{path} {error}")

    async with browsing(app, on_error=note) as client:
        path = f"/api/v1/{app.name}/schedule/list" if as_json else f"/{app.name}/schedules"
        answer = await client.get(path)
    assert answer.status_code == 500
    assert "not as it should be (ValueError: odd)" in read_text(answer.text)
    assert "Traceback" not in answer.text
    assert noted == [f"{path} odd"]


@pytest.mark.parametrize("name", ["a\x1b[31m", "a\x9b", "a\u202eb", "a" * 201, "a\x00"])
def test_an_application_has_a_name_that_can_be_printed(name: str) -> None:
    with pytest.raises(Misconfigured, match="printable characters") as raised:
        App(name)
    assert len(str(raised.value)) < 400
