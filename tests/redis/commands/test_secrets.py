"""Secrets: no object of celery5 shows the password of a broker, whoever prints it."""

import gc
import io
import json
import pickle
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import trio

import celery5
from celery5 import App, CeleryError
from celery5.config.settings import (
    ExplicitSettings,
    LoadedConfiguration,
    Settings,
    SettingSource,
    get_origins,
    read_settings,
)
from celery5.logs.log import Log, LogWriter
from celery5.processes import scheduler
from tests.redis.worker.workers import start, working

SECRET = "s3cr3t-Pa55"
TLS = f"rediss://clerk:{SECRET}@127.0.0.1:1/0"


def _with_password(url: str) -> str:
    """Return the URL of the tests' server with a password; the server lets everybody in."""
    return url.replace("unix://", f"unix://default:{SECRET}@", 1)


def _of_celery5(*roots: Any) -> Iterator[Any]:
    """Yield everything of celery5's that is alive in this process, and what it holds."""
    seen = set[int]()
    gc.unfreeze()  # `tests.house.sources` freezes what there is
    todo = [*roots, *gc.get_objects()]
    for depth in range(3):
        found = [item for item in todo if _is_ours(item) and id(item) not in seen]
        seen.update(map(id, found))
        yield from found
        todo = gc.get_referents(*found)
        if depth == 0:
            todo += gc.get_referents(*[item for item in todo if isinstance(item, dict | list | tuple)])


def _is_ours(thing: object) -> bool:
    module: Any = type(thing).__module__  # a property of some metaclass
    return isinstance(module, str) and module.startswith("celery5")


def _showing(*roots: Any) -> list[str]:
    """Return the names of the types whose objects show the password."""
    showing = set[str]()
    count = 0
    for found in _of_celery5(*roots):
        count += 1
        if SECRET in f"{found!r} {found!s} {found}":
            showing.add(f"{type(found).__module__}.{type(found).__qualname__}")
    assert count > 100
    return sorted(showing)


async def test_no_object_of_a_process_shows_the_password_of_its_broker(
    app_name: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELERY5_BROKERS", json.dumps({"other": _with_password(url)}))
    app = App(
        app_name, broker=_with_password(url), routes={"far*": "other"}, lease=1.0, autoscale="maximum=1"
    )

    @app.task(queue="far")
    async def far() -> int:
        return 1

    @app.task
    def near() -> int:
        return 2

    async with working(app), trio.open_nursery() as nursery:
        one = await start(nursery, app, page=scheduler.SCHEDULER)
        results = [await far.adelay(), await near.adelay()]
        assert [await result.aget(30) for result in results] == [1, 2]
        values = [app, app.settings, app.connections, app.brokers, app.control, results, far, near, near.s()]
        found = [
            get_origins(app),
            ExplicitSettings(broker=TLS),
            SettingSource("said", "x", TLS),
            LoadedConfiguration("x", {"broker": TLS}),
        ]
        showing = _showing(*values, *found)
        assert showing == []
        assert SECRET not in repr(found) + repr(values)
        await one.stop()
    app.close()


def test_the_settings_show_all_but_the_passwords() -> None:
    settings = Settings(broker=TLS, brokers={"far": TLS}, publisher=f"tls://u:{SECRET}@h:1")
    shown = f"{settings!r} {settings} {[settings]}"
    assert SECRET not in shown
    assert "rediss://clerk:***@127.0.0.1:1/0" in shown
    assert "concurrency=100" in shown
    assert settings.broker == TLS


MADE_OF_A_URL = {"App", "SQLSink"}
"""The public classes that take a URL. The others refuse it, so there is no object that could show one."""


@pytest.mark.parametrize(
    "name", [name for name in celery5.__all__ if isinstance(getattr(celery5, name), type)]
)
def test_no_public_object_that_can_be_made_of_a_url_shows_its_password(name: str) -> None:
    kind = getattr(celery5, name)
    sets = ({"broker": TLS}, {"url": TLS}, {"address": TLS}, {"broker": TLS, "name": "shop"})
    shown = [_shown(kind, arguments) for arguments in sets]
    assert all(SECRET not in text for _, text in shown)
    assert any(made for made, _ in shown) == (name in MADE_OF_A_URL)


def _shown(kind: Any, arguments: dict[str, str]) -> tuple[bool, str]:
    """Return whether an object was made, and how it shows itself, or the error that it is not made."""
    try:
        made = kind(**arguments)
    except Exception as error:
        return False, _all_text(error)
    return True, f"{made!r} {made!s}"


def _all_text(error: BaseException) -> str:
    """Return all that can be seen of an error: itself, what caused it, its fields, and what is sent elsewhere."""
    fields = [f"{value!r} {value!s}" for value in vars(error).values()]
    return "\n".join(
        [
            *traceback.format_exception(error),
            repr(error),
            json.dumps([str(error), [str(arg) for arg in error.args]]),
            repr(pickle.dumps([str(error), *map(str, error.args)])),
            *fields,
        ]
    )


WRONG = [
    TLS,
    f"redis://clerk:{SECRET}@127.0.0.1:1/0",
    f"redis://clerk:{SECRET}@127.0.0.1:1/zero",
    f"redis://clerk:{SECRET}@127.0.0.1:99999/0",
    f"redis://clerk:{SECRET}@host:port",
    f"redis://clerk:{SECRET}@[::1/0",
    f"redis://clerk:a/{SECRET}@127.0.0.1:1",
    f"redis://clerk:{SECRET}#@127.0.0.1:1",
    f"redis://clerk:1234#{SECRET}@127.0.0.1:1/0",
    f"redis://clerk:{SECRET}@h,h2/0",
    f"redis://clerk:{SECRET}@h?port=0",
    f"amqp://clerk:{SECRET}@127.0.0.1",
    f"redis://127.0.0.1:1/0?password={SECRET}",
    f"redis://127.0.0.1:1/0?passwort={SECRET}&username=x",
    f"unix://clerk:{SECRET}@/nowhere/redis.sock",
    f"clerk:{SECRET}@127.0.0.1:1",
]


@pytest.mark.parametrize("url", WRONG)
@pytest.mark.parametrize("where", ["broker", "brokers"])
def test_no_error_and_no_log_line_shows_the_password_of_a_broker_that_cannot_be_used(
    url: str, where: str
) -> None:
    said: dict[str, Any] = (
        {"broker": url} if where == "broker" else {"brokers": {"far": url}, "routes": {"*": "far"}}
    )
    stream = io.StringIO()
    with LogWriter(stream):
        error = _sent(said)
        Log(worker="w", app="shop").event("broker:connect-failed", "warning", why=str(error))
    assert SECRET not in _all_text(error)
    assert SECRET not in stream.getvalue()


def _sent(said: dict[str, Any]) -> CeleryError:
    """Return the error that sending a job is with these settings."""
    try:
        app = App("shop", backlog=0, **said)
        app.task(name="t")(len).delay([])
    except CeleryError as error:
        return error
    raise AssertionError("it was sent")


@pytest.mark.parametrize("name", ["BROKERS", "STATUS_PORT", "BROKER"])
def test_no_error_of_settings_shows_a_password(name: str) -> None:
    environ = {f"CELERY5_{name}": f'{{"far": "{TLS}"'}
    with pytest.raises(CeleryError) as caught:
        read_settings({"concurrency": TLS, "brokers": {"a": 1, "b": TLS}}, environ)
    assert SECRET not in _all_text(caught.value)
