"""Who gets in: sessions, one-time tokens, tokens in a file, a proxy's headers, and who is refused."""

import re
from pathlib import Path

import httpx
import pytest

from celery5 import App
from celery5.dashboard import Dashboard, ProxyHeaders, TokenFile
from celery5.dashboard.access import Authenticator, OneTimeToken, User, hash_token
from celery5.dashboard.sessions import Session, Sessions
from celery5.errors import Misconfigured
from tests.redis.dashboard.site import browsing, find_form_key, read_text

SECRET = "0123456789abcdef" * 2


def reach(
    app: App,
    authenticator: Authenticator,
    *,
    client: tuple[str, int] = ("127.0.0.1", 1),
    hosts: tuple[str, ...] = (),
) -> httpx.AsyncClient:
    """A client of a dashboard with this authenticator."""
    dashboard = Dashboard(app, authenticator=authenticator, hosts=hosts)
    transport = httpx.ASGITransport(app=dashboard, client=client)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8555")


async def test_nobody_sees_anything_without_signing_in(app: App) -> None:
    async with reach(app, OneTimeToken()) as client:
        for path in ("/", f"/{app.name}", f"/{app.name}/queues", f"/{app.name}/do/queue/purge", "/nothing"):
            answer = await client.get(path)
            assert (answer.status_code, answer.headers["location"]) == (303, "/sign-in"), path
        for path in ("/api/v1", "/api/v1/openapi.json", f"/api/v1/{app.name}/queue/list"):
            assert (await client.get(path)).status_code == 401, path
        assert (await client.post(f"/{app.name}/do/queue/purge", data={"queue": "q"})).status_code == 401
        page = await client.get("/sign-in")
        assert page.status_code == 200
        assert app.name not in read_text(page.text)


async def test_a_printed_address_signs_in_once_and_the_next_one_is_told(app: App) -> None:
    announced: list[str] = []
    tokens = OneTimeToken(announced.append)
    first = tokens.token
    async with reach(app, tokens) as client:
        answer = await client.get("/sign-in", params={"token": first})
        assert answer.status_code == 303
        cookie = answer.headers["set-cookie"]
        assert "httponly" in cookie.lower()
        assert "samesite=strict" in cookie.lower()
        assert (await client.get(f"/{app.name}/queues")).status_code == 200
    assert announced == [tokens.token] != [first]
    async with reach(app, tokens) as other:
        assert (await other.get("/sign-in", params={"token": first})).status_code == 401
        assert (await other.get("/")).headers["location"] == "/sign-in"


async def test_a_session_ends_when_it_is_signed_out_forged_or_over(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = Sessions()
    user = User("anna", "viewer")
    cookie = sessions.make(user, "grant")
    session = sessions.read(cookie)
    assert isinstance(session, Session)
    assert (session.user, session.grant) == (user, "grant")
    assert Sessions().read(cookie) is None
    body, _, signature = cookie.partition(".")
    other = "1" if signature.endswith("0") else "0"
    forgeries = ("", ".", "nonsense", body, f"{body}.{signature[:-1]}{other}", f"{body}x.{signature}", "é.é")
    for forged in forgeries:
        assert sessions.read(forged) is None
    now = 1e12
    monkeypatch.setattr("celery5.dashboard.sessions.time.time", lambda: now)
    assert sessions.read(cookie) is None
    monkeypatch.undo()
    tokens = OneTimeToken()
    async with reach(app, tokens) as client:
        await client.get("/sign-in", params={"token": tokens.token})
        page = await client.get(f"/{app.name}/queues")
        await client.post("/sign-out", data={"form_key": find_form_key(page.text)})
        assert (await client.get(f"/{app.name}/queues")).status_code == 303


async def test_a_token_of_the_file_signs_in_as_its_user_until_its_line_is_removed(
    app: App, tmp_path: Path
) -> None:
    file = tmp_path / "tokens"
    file.write_text(
        f"# who may\nbob operator {hash_token('secret-of-bob')}\neve viewer {hash_token('eve')}\n"
    )
    file.chmod(0o600)
    async with reach(app, TokenFile(file)) as client:
        assert (await client.post("/sign-in", data={"token": "wrong"})).status_code == 401
        assert (await client.post("/sign-in", data={"token": "secret-of-bob"})).status_code == 303
        assert "bob operator" in read_text((await client.get(f"/{app.name}/queues")).text)
        bearer = {"authorization": "Bearer eve"}
        answer = await client.get("/api/v1", headers=bearer)
        assert answer.json()["user"] == {"name": "eve", "role": "viewer"}
        assert (await client.get("/api/v1", headers={"authorization": "Bearer x"})).status_code == 401
        file.write_text(f"eve viewer {hash_token('eve')}\n")
        assert (await client.get(f"/{app.name}/queues")).status_code == 303


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [
        ("bob", 0o600, "line 1: write NAME ROLE HASH"),
        (f"bob boss {'0' * 64}", 0o600, "line 1: write NAME ROLE HASH"),
        ("bob viewer abc", 0o600, "line 1: write NAME ROLE HASH"),
        ("", 0o622, "others may write it: chmod 600"),
    ],
)
def test_a_file_of_tokens_that_is_wrong_is_refused_in_one_line(
    tmp_path: Path, text: str, mode: int, problem: str
) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(Misconfigured, match=problem):
        TokenFile(file)
    with pytest.raises(Misconfigured, match="cannot be read"):
        TokenFile(tmp_path / "nothing")


async def test_headers_of_a_proxy_count_only_when_they_come_from_it(app: App) -> None:
    access = ProxyHeaders("x-user", role_header="x-role", proxies=["10.0.0.1"], secret=SECRET)
    who = {"x-user": "carol", "x-role": "Operator", "x-celery5-proxy-secret": SECRET}
    async with reach(app, access, client=("10.0.0.1", 7)) as proxied:
        assert (await proxied.get("/api/v1", headers=who)).json()["user"] == {
            "name": "carol",
            "role": "operator",
        }
        no_role = await proxied.get("/api/v1", headers={**who, "x-user": "dan", "x-role": ""})
        assert no_role.json()["user"] == {"name": "dan", "role": "viewer"}
        assert (await proxied.get("/api/v1", headers={**who, "x-role": "boss"})).status_code == 401
        assert (await proxied.get("/api/v1")).status_code == 401
    async with reach(app, access, client=("10.0.0.2", 7)) as direct:
        assert (await direct.get("/api/v1", headers=who)).status_code == 401
    with pytest.raises(Misconfigured, match="give the header"):
        ProxyHeaders("", proxies=["10.0.0.1"])


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
    ],
)
async def test_a_form_of_another_site_is_refused(app: App, headers: dict[str, str]) -> None:
    await app.asend_many([])
    async with browsing(app) as client:
        form = await client.get(f"/{app.name}/do/task/suspend")
        values = {"task": "t", "form_key": find_form_key(form.text)}
        answer = await client.post(f"/{app.name}/do/task/suspend", data=values, headers=headers)
        assert answer.status_code == 403
    assert await app.limits.alist() == {}


async def test_another_site_may_link_to_a_page_but_neither_read_nor_embed_it(app: App) -> None:
    async with browsing(app) as client:
        path = f"/{app.name}/queues"
        link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        page = await client.get(path, headers=link)
        assert page.status_code == 200
        policy = page.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in policy
        assert "default-src 'none'" in policy
        nonce = re.search(r"'nonce-([^']+)'", policy)
        assert nonce
        scripts = re.findall(r"<script[^>]*>", page.text)
        assert scripts
        assert all(f'nonce="{nonce[1]}"' in script for script in scripts)
        assert "unsafe" not in policy
        assert not re.search(r"\s(style|on\w+)=", page.text)
        other = await client.get(path, headers={**link, "sec-fetch-mode": "no-cors"})
        assert other.status_code == 403
        assert (await client.get(path)).headers["content-security-policy"] != policy


async def test_a_form_without_its_key_or_with_that_of_another_is_refused(app: App) -> None:
    async with browsing(app) as client, browsing(app, role="viewer") as other:
        theirs = await other.get(f"/{app.name}/queues")
        for key in ({}, {"form_key": ""}, {"form_key": "0" * 64}, {"form_key": find_form_key(theirs.text)}):
            answer = await client.post(f"/{app.name}/do/task/suspend", data={"task": "t", **key})
            assert answer.status_code == 403
            assert "out of date" in read_text(answer.text)
        api = f"/api/v1/{app.name}/task/suspend"
        assert (await client.post(api, json={"task": "t"})).status_code == 403
    assert await app.limits.alist() == {}


@pytest.mark.filterwarnings("ignore:.*ByteStream.__aiter__:pytest.PytestUnraisableExceptionWarning")
async def test_other_methods_and_large_bodies_are_refused(app: App) -> None:
    async with browsing(app) as client:
        assert (await client.delete(f"/{app.name}/queues")).status_code == 405
        api = f"/api/v1/{app.name}/task/suspend"
        headers = {"authorization": "Bearer x", "x-test-script": "1", "content-type": "application/json"}
        large = await client.post(api, content=b"x" * (2 * 1024 * 1024), headers=headers)
        assert large.status_code == 400
        assert large.json()["detail"] == "this request has more than 1048576 bytes"


async def test_a_password_that_a_browser_sends_by_itself_does_not_stand_for_the_form_key(app: App) -> None:
    basic = {"authorization": "Basic YW5uYTpzZWNyZXQ="}
    async with browsing(app) as client:
        page = await client.get(f"/{app.name}/queues", headers=basic)
        path = f"/{app.name}/do/task/suspend"
        assert (await client.post(path, data={"task": "t"}, headers=basic)).status_code == 403
        key = {"form_key": find_form_key(page.text)}
        assert (await client.post("/sign-out", data=key, headers=basic)).status_code == 303
    assert await app.limits.alist() == {}
    tokens = OneTimeToken()
    async with reach(app, tokens) as client:
        await client.get("/sign-in", params={"token": tokens.token})
        assert (await client.get(f"/{app.name}/queues", headers=basic)).status_code == 200


# The client of these tests leaves its own generator open when a body is not read to its end.
@pytest.mark.filterwarnings("ignore:.*ByteStream.__aiter__:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("method", "path", "body", "status", "line"),
    [
        ("GET", "/sign-in?token=%FF", b"", 400, "this request cannot be read"),
        ("GET", "/{app}/queues?match=%FF", b"", 400, "this request cannot be read"),
        ("POST", "/sign-in", b"x" * (2 * 1024 * 1024), 400, "more than 1048576 bytes"),
        ("POST", "/sign-out", b"form_key=wrong", 403, "this form is out of date"),
    ],
)
async def test_a_bad_request_is_answered_in_one_line(
    app: App, method: str, path: str, body: bytes, status: int, line: str
) -> None:
    async with browsing(app) as client:
        answer = await client.request(method, path.format(app=app.name), content=body)
    assert answer.status_code == status
    assert line in read_text(answer.text)


async def test_token_file_that_breaks_in_use_is_logged_in_one_line(app: App, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"eve viewer {hash_token('eve')}\n")
    file.chmod(0o600)
    errors: list[str] = []
    dashboard = Dashboard(
        app,
        authenticator=TokenFile(file),
        hosts=["jobs.example"],
        on_error=lambda _path, error: errors.append(str(error)),
    )
    transport = httpx.ASGITransport(app=dashboard)
    async with httpx.AsyncClient(transport=transport, base_url="http://jobs.example") as client:
        file.write_text("nonsense\n")
        answer = await client.get("/api/v1", headers={"authorization": "Bearer eve"})
        assert (answer.status_code, answer.text) == (500, "this dashboard has an error: see its log\n")
    (error,) = errors
    assert "line 1: write NAME ROLE HASH" in error
