"""The front door of the dashboard: which names, tokens, sessions and paths get in, by raw requests to a real server."""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import trio
from starlette.applications import Starlette
from starlette.routing import Mount

from celery5 import App
from celery5.dashboard import Dashboard, Identify, ProxyHeaders, TokenFile, User, guard
from celery5.dashboard.access import Authenticator, hash_token
from celery5.dashboard.hosts import AllowedHosts
from celery5.dashboard.sessions import Sessions
from celery5.errors import Misconfigured
from celery5.observability.job_search import JobPage
from celery5.processes.dashboard import DashboardOptions, open_socket
from tests.redis.dashboard.serving import LIMIT, Served, serving
from tests.redis.dashboard.site import find_form_key, read_text

SECRET = "0123456789abcdef" * 2
BAD_HOSTS = [
    "evil.example",
    "evil.example:8555",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "localhost@evil.example",
    "localhost, evil.example",
    "localhost evil.example",
    "localhost:0",
    "localhost:99999",
    "localhost:80:80",
    "localhost:x",
    "localhost..",
    ".localhost",
    "[::1",
    "::1",
    "[::2]",
    "[127.0.0.1]",
    "127.1",
    "2130706433",
    "0x7f.0.0.1",
    "0.0.0.0",
    "10.0.0.7",
    "",
]
GOOD_HOSTS = [
    "localhost",
    "localhost:9000",
    "LocalHost:1",
    "localhost.",
    "localhost.:9000",
    "127.0.0.1",
    "127.0.0.1:65535",
    "127.0.0.2:8555",
    "[::1]",
    "[::1]:9000",
    "[0:0:0:0:0:0:0:1]:9000",
]


Place = Callable[[Path], DashboardOptions]


def on_loopback(short_path: Path) -> DashboardOptions:
    return DashboardOptions(port=0)


def on_a_socket(short_path: Path) -> DashboardOptions:
    return DashboardOptions(path=str(short_path / "private" / "d.sock"))


PLACES = pytest.mark.parametrize("place", [on_loopback, on_a_socket], ids=["tcp", "unix"])


@PLACES
async def test_only_loopback_names_and_public_hosts_are_taken_as_host(
    app: App, short_path: Path, place: Place
) -> None:
    async with serving(app, place(short_path)) as served:
        session = await served.sign_in()
        for host in GOOD_HOSTS:
            assert (await served.get("/api/v1", session, host=host)).status == 200, host
        for host in BAD_HOSTS:
            answer = await served.get("/api/v1", session, host=host)
            assert answer.status in (400, 421), host
            assert app.name not in answer.body, host
            assert (await served.get("/sign-in", host=host)).status in (400, 421), host


@PLACES
async def test_a_request_has_one_host_and_its_target_names_no_other(
    app: App, short_path: Path, place: Place
) -> None:
    async with serving(app, place(short_path)) as served:
        session = (await served.sign_in()).encode()
        rest = b"\r\n" + session + b"\r\nConnection: close\r\n\r\n"
        for line, status in (
            (b"GET /api/v1 HTTP/1.1\r\nHost: localhost", 200),
            (b"GET /api/v1 HTTP/1.1\r\nX: y", 400),
            (b"GET /api/v1 HTTP/1.0\r\nX: y", 421),
            (b"GET /api/v1 HTTP/1.1\r\nHost: localhost\r\nHost: localhost", 400),
            (b"GET /api/v1 HTTP/1.1\r\nHost: evil.example\r\nHost: localhost", 400),
            (b"GET http://localhost/api/v1 HTTP/1.1\r\nHost: localhost", 200),
            (b"GET http://evil.example/api/v1 HTTP/1.1\r\nHost: localhost", 400),
            (b"GET http://evil.example/api/v1 HTTP/1.1\r\nHost: evil.example", 421),
            (b"GET http://localhost/api/v1 HTTP/1.1\r\nHost: evil.example", 400),
            (b"GET //evil.example/api/v1 HTTP/1.1\r\nHost: evil.example", 421),
            (b"OPTIONS * HTTP/1.1\r\nHost: localhost", 400),
            (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost", 400),
            (b"GET /api/v1 HTTP/1.1\r\nHost: evil.example\r\nX-Forwarded-Host: localhost", 421),
            (b"GET /api/v1 HTTP/1.1\r\nHost: evil.example\r\nForwarded: host=localhost", 421),
            (b"GET /api/v1 HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-Host: evil.example", 200),
        ):
            assert (await served.ask(line + rest)).status == status, line


async def test_public_hosts_are_taken_with_their_ports(app: App) -> None:
    options = DashboardOptions(
        port=0, hosts=["jobs.example", "other.example:8443", "2001:db8::1"], public_url="https://Jobs.Test/"
    )
    async with serving(app, options) as served:
        for host, status in (
            ("jobs.example", 200),
            ("JOBS.example.:1234", 200),
            ("other.example:8443", 200),
            ("other.example:8444", 421),
            ("other.example", 421),
            ("[2001:db8:0::1]:80", 200),
            ("jobs.test", 200),
            ("jobs.test:443", 200),
            ("jobs.test:8443", 421),
            ("sub.jobs.example", 421),
        ):
            assert (await served.get("/sign-in", host=host)).status == status, host


@pytest.mark.parametrize(
    ("hosts", "public_url"),
    [
        (["http://jobs.example"], ""),
        (["jobs.example/jobs"], ""),
        (["*"], ""),
        ([""], ""),
        ([], "jobs.example"),
        ([], "ftp://jobs.example"),
        ([], "https://[::1"),
        ([], "https://jobs.example/path"),
    ],
)
def test_a_public_host_or_url_that_cannot_be_read_is_refused(hosts: list[str], public_url: str) -> None:
    with pytest.raises(Misconfigured, match=r"is no name of a host|cannot be used"):
        AllowedHosts(hosts, public_url)


@pytest.mark.parametrize("prefix", ["", "/jobs"])
async def test_a_mounted_dashboard_takes_loopback_names_and_those_that_it_is_given(
    app: App, prefix: str
) -> None:
    access = Identify(lambda request: User("anna", "admin"))
    for hosts, host, status in (
        ([], "shop.example", 421),
        ([], "localhost:8000", 200),
        (["shop.example"], "shop.example", 200),
        (["shop.example"], "evil.example", 421),
    ):
        dashboard = Dashboard(app, authenticator=access, hosts=hosts)
        site = Starlette(routes=[Mount(prefix, dashboard)]) if prefix else dashboard
        transport = httpx.ASGITransport(app=site)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            answer = await client.get(f"{prefix}/api/v1")
            assert answer.status_code == status, (hosts, host)
            assert status == 200 or "hosts=[NAME]" in answer.text


@PLACES
async def test_nobody_is_known_without_a_token_and_each_signs_in_once(
    app: App, short_path: Path, place: Place
) -> None:
    async with serving(app, place(short_path)) as served:
        assert (await served.get("/api/v1")).status == 401
        link = served.find_link()
        assert (await served.ask(f"HEAD {link} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())).status == 200
        session = f"Cookie: {(await served.get(link)).get_cookie()}"
        assert '"role":"admin"' in (await served.get("/api/v1", session)).body
        assert (await served.get(link)).status == 401
        assert served.find_link() != link


async def sign_out(served: Served, session: str) -> None:
    page = await served.get("/nothing", session)
    key = find_form_key(page.body)
    assert (await served.post("/sign-out", f"form_key={key}", session)).status == 303


@PLACES
async def test_a_cookie_is_refused_once_its_session_was_signed_out(
    app: App, short_path: Path, place: Place
) -> None:
    async with serving(app, place(short_path)) as served:
        first, second = await served.sign_in(), await served.sign_in()
        await sign_out(served, first)
        assert (await served.get("/api/v1", first)).status == 401
        assert (await served.get("/api/v1", second)).status == 200


async def test_processes_with_one_secret_know_what_another_has_signed_out(app: App) -> None:
    options = DashboardOptions(port=0, secret=SECRET)
    async with serving(app, options) as served, serving(app, options) as other:
        first, second = await served.sign_in(), await served.sign_in()
        assert (await other.get("/api/v1", first)).status == 200
        await sign_out(served, first)
        assert (await served.get("/api/v1", first)).status == 401
        assert (await other.get("/api/v1", first)).status == 401
        assert (await other.get("/api/v1", second)).status == 200
    async with serving(app, options) as next_one:
        assert (await next_one.get("/api/v1", first)).status == 401
        assert (await next_one.get("/api/v1", second)).status == 200
    async with serving(app, DashboardOptions(port=0, secret=SECRET[::-1])) as stranger:
        assert (await stranger.get("/api/v1", second)).status == 401


async def test_a_session_that_cannot_be_checked_gets_in_nowhere(app: App) -> None:
    options = DashboardOptions(port=0, secret=SECRET)
    unreachable = App(app.name, broker="redis://127.0.0.1:1")
    async with serving(app, options) as served, serving(unreachable, options) as other:
        session = await served.sign_in()
        assert (await other.get("/api/v1", session)).status == 503
        assert (await other.get("/sign-in")).status == 200
    unreachable.close()


def write_tokens(file: Path, *lines: str) -> None:
    file.write_text("".join(f"{line}\n" for line in lines))
    file.chmod(0o600)


async def test_a_session_ends_with_the_token_that_began_it(app: App, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    eve = f"eve admin {hash_token('first')}"
    write_tokens(file, eve)
    async with serving(app, DashboardOptions(port=0, authenticator=TokenFile(file))) as served:

        async def sign_in(token: str) -> str:
            return f"Cookie: {(await served.post('/sign-in', f'token={token}')).get_cookie()}"

        session = await sign_in("first")
        for lines, status in (
            ([eve, f"eve admin {hash_token('second')}"], 200),
            ([f"eve admin {hash_token('second')}"], 401),  # the token was replaced
            ([eve.replace("admin", "viewer")], 401),
            ([eve.replace("eve", "bob")], 401),
            ([f"{eve} 2000-01-01"], 401),  # it has expired
            ([f"{eve} 2999-01-01T00:00:00+00:00"], 200),
            ([eve], 200),
        ):
            write_tokens(file, *lines)
            assert (await served.get("/api/v1", session)).status == status, lines
        write_tokens(file, f"{eve} 2000-01-01")
        assert (await served.get("/api/v1", "Authorization: Bearer first")).status == 401
        assert (await served.post("/sign-in", "token=first")).status == 401


async def test_only_a_token_for_one_time_is_taken_from_an_address(app: App, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    write_tokens(file, f"eve admin {hash_token('first')}")
    async with serving(app, DashboardOptions(port=0, authenticator=TokenFile(file))) as served:
        for path in (
            "/sign-in?token=first",
            "/?token=first",
            "/api/v1?token=first",
            "/api/v1?access_token=first",
        ):
            answer = await served.get(path)
            assert answer.status in (303, 401), path
            assert "set-cookie" not in answer.head, path
        assert "not taken from an address" in read_text((await served.get("/sign-in?token=first")).body)
        assert (await served.post("/sign-in?token=first", "")).status == 200
        assert (await served.post("/sign-in", "token=first")).status == 303


async def test_a_user_with_many_requests_keeps_no_other_user_out(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "WAIT_LIMIT", 0.5)
    running, most, go_on = 0, 0, trio.Event()

    async def search(*_: Any, **__: Any) -> JobPage:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go_on.wait()
        running -= 1
        return JobPage(jobs=(), cursor=None, looked_at=0, not_looked_at="")

    monkeypatch.setattr(type(app.jobs), "asearch", search)
    file = tmp_path / "tokens"
    write_tokens(file, f"eve viewer {hash_token('eve')}", f"bob viewer {hash_token('bob')}")
    answers: list[int] = []

    async def ask(served: Served, number: int) -> None:
        path = f"/api/v1/{app.name}/task/search?id={number}"
        answer = await served.get(path, "Authorization: Bearer eve")
        answers.append(answer.status)
        if answer.status == 429:
            assert "content-type: application/problem+json" in answer.head.lower()

    async with serving(app, DashboardOptions(port=0, authenticator=TokenFile(file))) as served:
        async with trio.open_nursery() as nursery:
            for number in range(120):
                nursery.start_soon(ask, served, number)
            with trio.fail_after(LIMIT):
                while len(answers) < 120 - guard.MAX_AT_ONCE:
                    await trio.sleep(0.01)
            assert set(answers) == {429}
            assert (await served.get("/api/v1", "Authorization: Bearer bob")).status == 200
            refused = await served.get("/api/v1", "Authorization: Bearer eve")
            assert (refused.status, "retry-after: 1" in refused.head) == (429, True)
            go_on.set()
        assert answers.count(200) == most == guard.MAX_AT_ONCE
        assert (await served.get("/api/v1", "Authorization: Bearer eve")).status == 200


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_a_turn_is_given_back_by_requests_that_end_fail_or_are_cancelled(backend: str) -> None:
    shares = guard.UserShares()

    async def take(*, fails: bool = False) -> None:
        async with shares.take("eve") as has_turn:
            assert has_turn
            await anyio.sleep(0.01)
            if fails:
                raise ValueError

    async def play() -> None:
        for number in range(3 * guard.MAX_AT_ONCE):
            with suppress(ValueError), anyio.move_on_after(0 if number % 3 else 1):
                await take(fails=number % 2 == 0)
        async with anyio.create_task_group() as tasks:
            for _ in range(guard.MAX_AT_ONCE + guard.MAX_WAITING):
                tasks.start_soon(take)
        assert shares.users == 0

    anyio.run(play, backend=backend)


async def test_cookies_are_for_tls_alone_where_the_public_url_is_https(app: App) -> None:
    async with serving(app, DashboardOptions(port=0, public_url="https://jobs.example")) as served:
        assert served.lines[0].startswith("dashboard: https://jobs.example/sign-in?token=")
        answer = await served.get(served.find_link(), host="jobs.example")
        assert re.search(r"set-cookie: celery5_.*; secure", answer.head.lower())
        assert "strict-transport-security: max-age=31536000" in answer.head
    async with serving(app, DashboardOptions(port=0)) as served:
        answer = await served.get(served.find_link())
        assert "secure" not in answer.head.lower()
        assert "strict-transport-security" not in answer.head


def make_proxy(secret: str) -> ProxyHeaders:
    return ProxyHeaders("u", proxies=["::1"], secret=secret)


@pytest.mark.parametrize("make", [Sessions, make_proxy])
def test_a_secret_that_can_be_guessed_is_refused(make: Callable[[str], object]) -> None:
    for secret in ("short", "é" * 15, "x" * 31):
        with pytest.raises(Misconfigured, match=r"needs at least 32: make one with openssl rand -hex 32"):
            make(secret)
    make("é" * 16)


@pytest.mark.parametrize(
    "path",
    [
        "/sign-inX",
        "/sign-in/",
        "/sign-in/queues",
        "/sign-in%2Fqueues",
        "//sign-in",
        "/sign-in;x",
        "/sign-in%00",
        "/static/",
        "/static/queues",
        "/static/do/queue/purge",
        "/static/../{app}/queues",
        "/static/%2e%2e/{app}/queues",
        "/static/%2E%2E%2F{app}/queues",
        "//static/x",
        "/static//{app}",
        "/STATIC/x",
        "/static/{digest}/../../{app}/queues",
        "/static/{digest}/%2e%2e/%2e%2e/api/v1",
        "/static/{digest}/nothing.css",
    ],
)
async def test_paths_that_only_look_open_are_closed(app: App, path: str) -> None:
    async with serving(app, DashboardOptions(port=0)) as served:
        page = (await served.get("/sign-in")).body
        sheet = re.search(r'href="(/static/(\w+)/[\w.]+)"', page)
        assert sheet
        assert (await served.get(sheet[1])).status == 200
        answer = await served.get(path.format(app=app.name, digest=sheet[2]))
        assert answer.status == 303, answer
        assert "location: /sign-in\r\n" in f"{answer.head}\r\n"


async def post_suspension(served: Served, app: App, *headers: str, key: str = "") -> int:
    answer = await served.post(f"/{app.name}/do/task/suspend", f"task=t&form_key={key}", *headers)
    return answer.status


async def test_a_bearer_that_nobody_checks_does_not_stand_for_the_key_of_a_form(
    app: App, tmp_path: Path
) -> None:
    app.task(name="t")(lambda: None)
    proxy = ProxyHeaders("X-User", role_header="X-Role", proxies=["127.0.0.1"], secret=SECRET)
    named = ("X-User: anna", "X-Role: admin", f"X-Celery5-Proxy-Secret: {SECRET}", "Authorization: Bearer x")
    async with serving(app, DashboardOptions(port=0, authenticator=proxy)) as served:
        assert await post_suspension(served, app, *named) == 403
        key = find_form_key((await served.get("/nothing", *named)).body)
        assert await post_suspension(served, app, *named, key=key) == 303
    file = tmp_path / "tokens"
    write_tokens(file, f"eve admin {hash_token('first')}")
    async with serving(app, DashboardOptions(port=0, authenticator=TokenFile(file))) as served:
        cookie = f"Cookie: {(await served.post('/sign-in', 'token=first')).get_cookie()}"
        assert await post_suspension(served, app, cookie) == 403
        assert await post_suspension(served, app, cookie, "Authorization: Bearer wrong") == 401
        assert await post_suspension(served, app, cookie, "Authorization: Bearer first") == 303
    inside: Authenticator = Identify(lambda request: User("anna", "admin"))
    async with serving(app, DashboardOptions(port=0, authenticator=inside)) as served:
        assert await post_suspension(served, app, "Authorization: Bearer x") == 403
    await app.limits.aresume("t")


async def test_a_proxy_without_its_secret_is_not_believed(app: App) -> None:
    access = ProxyHeaders("X-User", role_header="X-Role", proxies=["127.0.0.1"], secret=SECRET)
    who = ("X-User: anna", "X-Role: admin")
    async with serving(app, DashboardOptions(port=0, authenticator=access)) as served:
        assert not [line for line in served.lines if "Warning" in line]
        for headers, status in (
            ((*who, f"X-Celery5-Proxy-Secret: {SECRET}"), 200),
            (who, 401),
            ((*who, "X-Celery5-Proxy-Secret: wrong"), 401),
            ((*who, f"X-Celery5-Proxy-Secret: {SECRET[:-1]}"), 401),
            ((*who, f"X-Celery5-Proxy-Secret: {SECRET}", "X-Celery5-Proxy-Secret: wrong"), 401),
            ((*who, "X-Celery5-Proxy-Secret: wrong", f"X-Celery5-Proxy-Secret: {SECRET}"), 401),
            # What a client has sent is there beside what the proxy adds.
            (("X-Role: admin", *who, f"X-Celery5-Proxy-Secret: {SECRET}"), 401),
            (("X-User: root", *who, f"X-Celery5-Proxy-Secret: {SECRET}"), 401),
            (("X-User: anna", "X-Role: admin, viewer", f"X-Celery5-Proxy-Secret: {SECRET}"), 401),
        ):
            assert (await served.get("/api/v1", *headers)).status == status, headers


async def test_headers_that_are_believed_without_a_secret_are_warned_of(app: App) -> None:
    access = ProxyHeaders("X-User", role_header="X-Role", proxies=["127.0.0.1", "::1"])
    async with serving(app, DashboardOptions(port=0, authenticator=access)) as served:
        (warning,) = [line for line in served.lines if line.startswith("Warning: ")]
        assert "X-User and X-Role" in warning
        assert "CELERY5_DASHBOARD_PROXY_SECRET" in warning
    with pytest.warns(UserWarning, match="CELERY5_DASHBOARD_PROXY_SECRET"):
        Dashboard(app, authenticator=access)


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost", 303),
        ("http://LOCALHOST.", 303),
        ("https://jobs.example", 303),
        ("http://jobs.example:9000", 403),
        ("http://localhost:9000", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("http://[::1", 400),
        ("http://", 400),
        ("nonsense", 400),
        ("http://localhost\r\nOrigin: http://localhost", 400),
    ],
)
async def test_a_form_comes_from_a_page_of_the_dashboard_itself(app: App, origin: str, status: int) -> None:
    async with serving(app, DashboardOptions(port=0, hosts=["jobs.example"])) as served:
        session = await served.sign_in()
        key = find_form_key((await served.get("/nothing", session)).body)
        answer = await served.post("/sign-out", f"form_key={key}", session, f"Origin: {origin}")
        assert answer.status == status


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_token_file_that_others_may_change_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    file = folder / "tokens"
    write_tokens(file, f"eve viewer {hash_token('eve')}")
    link = tmp_path / "link"
    link.symlink_to(file)
    TokenFile(file)
    TokenFile(link)
    os.chown(file, 12345, 0)
    with pytest.raises(Misconfigured, match="another user's"):
        TokenFile(file)
    os.chown(file, 0, 0)
    os.chown(folder, 12345, 0)
    with pytest.raises(Misconfigured, match="another user's"):
        TokenFile(file)
    os.chown(folder, 0, 0)
    for mode, is_fit in ((0o777, False), (0o720, False), (0o1777, True), (0o755, True)):
        folder.chmod(mode)
        if is_fit:
            TokenFile(file)
        else:
            with pytest.raises(Misconfigured, match="others may write it"):
                TokenFile(file)
            with pytest.raises(Misconfigured, match="others may write it"):
                TokenFile(link)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_socket_folder_of_another_user_or_open_to_others_is_refused(short_path: Path) -> None:
    folder = short_path / "private"
    options = DashboardOptions(path=str(folder / "d.sock"))
    with open_socket(options):
        assert folder.stat().st_mode & 0o777 == 0o700
    os.chown(folder, 12345, 0)
    with pytest.raises(Misconfigured, match="another user's"), open_socket(options):
        pass
    os.chown(folder, 0, 0)
    for mode in (0o710, 0o701, 0o777, 0o1777):
        folder.chmod(mode)
        with pytest.raises(Misconfigured, match="open to others"), open_socket(options):
            pass
    folder.chmod(0o700)
    with open_socket(options):
        pass
