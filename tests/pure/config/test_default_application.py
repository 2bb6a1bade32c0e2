"""Default application: what belongs to no other one is not sent there, unless somebody has chosen it."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest
import trio

from celery5 import App, BrokerUnavailable, Misconfigured, default_app
from celery5.app import DefaultApp
from celery5.cli.terminal.loading import load_app
from celery5.events.event import get_event_declaration
from celery5.testing import recorded

NOBODY = "redis://127.0.0.1:1/0"
FREE = """
from celery5 import task, event

@task(max_retries=7)
def mark_paid(n: int) -> int:
    return n

urgent = mark_paid.options(priority="high")

@event
class Paid:
    n: int
"""


@pytest.fixture(autouse=True)
def _without_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be sent is an error at once: these tests have no broker."""
    monkeypatch.setenv("CELERY5_BACKLOG", "0")


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> DefaultApp:
    """The default application, which nobody has chosen yet."""
    app = cast("DefaultApp", default_app())
    for name in ("settings", "connections"):
        monkeypatch.setitem(app.__dict__, name, None)
        del app.__dict__[name]
    monkeypatch.setattr(app, "_is_chosen", False)
    monkeypatch.setattr(app, "_searched_modules", 0)
    monkeypatch.setattr(app, "module", app.module)
    dict.clear(app.tasks)  # of other tests
    app.__dict__.pop("streams", None)
    monkeypatch.setenv("CELERY5_BROKER", NOBODY)
    return app


@pytest.fixture
def free(chosen: DefaultApp) -> Iterator[Any]:
    """A module with free tasks that no application has imported."""
    del chosen
    yield from make_module(f"free_{uuid4().hex}", FREE)  # applications of earlier tests include other ones


def make_module(name: str, code: str) -> Iterator[Any]:
    module = sys.modules[name] = ModuleType(name)
    exec(code, vars(module))
    yield module
    del sys.modules[name]


CALLS: list[Callable[[Any], object]] = [
    lambda free: free.mark_paid.delay(1),
    lambda free: trio.run(free.mark_paid.adelay, 1),
    lambda free: asyncio.run(free.mark_paid.adelay(1)),
    lambda free: free.urgent.delay(1),
    lambda free: free.mark_paid.options(countdown=5).delay(1),
    lambda free: free.mark_paid.s(1).delay(),
    lambda free: default_app().send_many([free.mark_paid.s(1)]),
    lambda free: default_app().send_jobs([free.mark_paid.job(1)]),
    lambda free: trio.run(default_app().asend_jobs, [free.mark_paid.job(1)]),
    lambda free: free.Paid.delay(n=1),
    lambda free: trio.run(lambda: free.Paid.adelay(n=1)),
    lambda free: (free.mark_paid.s(1) >> free.mark_paid.s(2)).start(),
    lambda free: trio.run((free.mark_paid.s(1) | free.mark_paid.s()).astart),
    lambda free: asyncio.run(free.mark_paid.map([1, 2]).astart()),
    lambda free: free.mark_paid.app.schedule.add(free.mark_paid.s(1), 60.0, name="x"),
    lambda free: free.mark_paid.app.result("x", task=free.mark_paid).status(),
    lambda free: free.mark_paid.app.limits.suspend(free.mark_paid),
    lambda free: free.mark_paid.app.stream("clicks").send({"page": "a"}),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
@pytest.mark.parametrize("publisher", ["", "tcp://127.0.0.1:1"])
def test_nothing_is_sent_to_it_that_nobody_has_chosen(
    free: Any, number: int, publisher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELERY5_PUBLISHER", publisher)
    monkeypatch.setenv("CELERY5_BACKLOG", "100")
    with pytest.raises(
        Misconfigured, match=r"import the module of your App first.*default_app\(\) in a module"
    ) as refused:
        CALLS[number](free)
    assert "\n" not in str(refused.value)
    assert default_app().backlog.size == 0


def test_what_was_refused_finds_its_application_later(free: Any) -> None:
    with pytest.raises(Misconfigured, match=r"^free_\w+\.mark_paid belongs to no application"):
        free.mark_paid.delay(1)
    with pytest.raises(Misconfigured):
        free.Paid.delay(n=1)
    assert free.mark_paid.app is free.urgent.app is default_app()
    shop = App(
        "shop", broker=NOBODY, include=[free.__name__], retry_policy={"max_retries": 1, "backoff": 9.0}
    )
    assert free.mark_paid.app is free.urgent.app is free.mark_paid.options(queue="x").app is shop
    assert free.mark_paid.policy.backoff == 9.0
    shop.load()
    assert list(shop.tasks) == [free.mark_paid.name]
    with pytest.raises(BrokerUnavailable):
        free.urgent.delay(1)
    with pytest.raises(BrokerUnavailable):
        free.Paid.delay(n=1)
    assert free.mark_paid.job(1).app == "shop"


def by_module(_free: Any, app: DefaultApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keeps_it", cast("Any", SimpleNamespace(app=app)))


def by_main(_free: Any, app: DefaultApp, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not app.is_chosen
    monkeypatch.setattr(sys.modules["__main__"], "app", app, raising=False)


def by_settings(_free: Any, app: DefaultApp, _monkeypatch: pytest.MonkeyPatch) -> None:
    app.configure(broker=NOBODY)


def by_broker(_free: Any, app: DefaultApp, _monkeypatch: pytest.MonkeyPatch) -> None:
    app.use_broker(NOBODY)


def by_command(free: Any, _app: DefaultApp, _monkeypatch: pytest.MonkeyPatch) -> None:
    load_app(free.__name__)


@pytest.mark.parametrize("choose", [by_module, by_main, by_settings, by_broker, by_command])
def test_it_sends_when_somebody_has_chosen_it(
    free: Any, chosen: DefaultApp, choose: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Misconfigured):
        free.mark_paid.delay(1)
    choose(free, chosen, monkeypatch)
    for send in (
        lambda: free.urgent.delay(1),
        lambda: free.Paid.delay(n=1),
        lambda: free.mark_paid.map([1]).start(),
    ):
        with pytest.raises(BrokerUnavailable):
            send()  # type: ignore[no-untyped-call]
    assert free.mark_paid.app is chosen
    assert not free.mark_paid.has_no_app


def test_its_jobs_are_made_and_recorded_without_a_choice(free: Any) -> None:
    assert free.mark_paid(3) == 3
    assert free.mark_paid.job(1).app == "celery5"
    with recorded(free.mark_paid.app) as sent:
        free.mark_paid.delay(1)
        assert sent.run() == [1]
    with pytest.raises(Misconfigured):
        free.mark_paid.delay(1)


def test_loading_refuses_an_included_task_of_another_application(free: Any, chosen: DefaultApp) -> None:
    chosen.configure(broker=NOBODY)
    with pytest.raises(BrokerUnavailable):
        free.mark_paid.delay(1)
    shop = App("shop", include=[free.__name__])
    with pytest.raises(
        Misconfigured, match=r"mark_paid is included by application 'shop'.*bound to application 'celery5'"
    ):
        shop.load()
    shop.include = ("bound",)
    code = "from celery5 import App, task\nother = App('other')\n@other.task\ndef theirs(): ...\n"
    for _ in make_module("bound", code):
        with pytest.raises(
            Misconfigured, match=r"theirs .*bound to application 'other'; declare it with celery5.task"
        ):
            shop.load()


def test_loading_refuses_an_included_event_of_another_application(free: Any, chosen: DefaultApp) -> None:
    chosen.configure(broker=NOBODY)
    with pytest.raises(BrokerUnavailable):
        free.Paid.delay(n=1)
    shop = App("shop", include=[free.__name__])
    with pytest.raises(
        Misconfigured,
        match=r"event .*Paid is included by application 'shop', whose Routers would never get it: it is bound to "
        r"application 'celery5'; import the module of 'shop' before the event is used",
    ):
        shop.load()
    code = "from celery5 import App, event\nother = App('other')\n@other.event\nclass Theirs:\n    n: int\n"
    for _ in make_module("bound_event", code):
        shop.include = ("bound_event",)
        with pytest.raises(
            Misconfigured, match=r"Theirs .*bound to application 'other'; declare it with celery5.event"
        ):
            shop.load()


def test_an_imported_event_of_another_application_is_no_mistake(free: Any) -> None:
    billing = App("billing", include=[free.__name__])
    billing.load()
    code = (
        f"from {free.__name__} import Paid\nfrom celery5 import task\n"
        "@task\ndef mine(n: int): ...\nPaid.subscribe(mine)\n"
    )
    for _ in make_module("imports_event", code):
        shop = App("shop", include=["imports_event"])
        shop.load()
        assert list(shop.events.group_subscriptions()) == ["billing"]


def test_a_free_event_that_two_applications_include_is_the_first_ones(free: Any) -> None:
    first, second = App("first", include=[free.__name__]), App("second", include=[free.__name__])
    first.load()
    second.load()
    second.load()
    assert get_event_declaration(free.Paid).app is first


def test_an_imported_task_of_another_application_is_no_mistake(free: Any) -> None:
    billing = App("billing", include=[free.__name__])
    billing.load()
    code = f"from {free.__name__} import mark_paid\nfrom celery5 import task\n@task\ndef mine(): ...\n"
    for _ in make_module("imports_it", code):
        shop = App("shop", include=["imports_it"])
        shop.load()
        assert [name.rpartition(".")[2] for name in shop.tasks] == ["mine"]
    assert free.mark_paid.app is billing


def test_a_free_task_that_two_applications_include_is_of_both(free: Any) -> None:
    first = App("first", include=[free.__name__], retry_policy={"max_retries": 1, "backoff": 1.0})
    second = App("second", include=[free.__name__], retry_policy={"max_retries": 1, "backoff": 2.0})
    first.load()
    second.load()
    second.load()
    name = free.mark_paid.name
    assert (first.tasks[name].app, second.tasks[name].app) == (first, second)
    assert (first.tasks[name].policy.backoff, second.tasks[name].policy.backoff) == (1.0, 2.0)
    assert free.mark_paid.app is first
