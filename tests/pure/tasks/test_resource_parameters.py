"""Parameters that take a resource: only tasks may have them, and their type must fit the opener."""

import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Annotated, Any, Protocol

import pytest

from celery5 import App, BootStep, Misconfigured
from celery5.boot_step import service
from celery5.events import Source
from celery5.health import HealthCheck
from celery5.streams import Keep
from celery5.tasks import INJECTED, Resource
from celery5.testing import recorded, replaced


class Bank:
    """What a resource is."""


def open_bank() -> Bank:
    """Open one."""
    return Bank()


TheBank = Annotated[Bank, Resource(open_bank)]


def nothing() -> None:
    """Take nothing."""


def plain(bank: TheBank = INJECTED) -> Any:
    """Called without arguments."""


def by_text(bank: "TheBank" = INJECTED) -> Any:
    """With an annotation that is text."""


async def awaited(bank: TheBank = INJECTED) -> Any:
    """Awaited."""


def taking(_value: Any, bank: TheBank = INJECTED) -> Any:
    """Called with one argument."""


async def emitting(_emit: Any, bank: TheBank = INJECTED) -> None:
    """A source."""


def archiving(_stream: str, _partition: int, _records: Any, bank: TheBank = INJECTED) -> None:
    """An archive."""


class Sink:
    """A Data Sink."""

    name = "bank"

    async def write(self, _documents: Any, bank: TheBank = INJECTED) -> None:
        """Write."""


class Step:
    """A boot step whose constructor takes one."""

    def __init__(self, bank: TheBank = INJECTED) -> None: ...

    async def run(self) -> None:
        """Run."""


class RunStep:
    """A service whose method takes one."""

    async def run(self, bank: TheBank = INJECTED) -> None:
        """Run."""


check = HealthCheck("vault")
KINDS: dict[str, Callable[[App], object]] = {
    "timer": lambda app: app.timer(1.0)(plain),
    "timer, by text": lambda app: app.timer(1.0)(by_text),
    "timer, a partial": lambda app: app.timer(1.0, name="part")(functools.partial(taking, 1)),
    "on_start": lambda app: app.on_start(awaited),
    "command": lambda app: app.command(plain),
    "health check": lambda app: app.health_check(name="vault")(awaited),
    "health check of a task": lambda app: app.health_check(name="vault")(app.task(plain)),
    "Publisher check": lambda app: app.publisher_check(name="vault")(plain),
    "limit rule": lambda app: app.limit_rule(every=1.0)(taking),
    "sink": lambda app: app.task(sinks=[Sink()])(nothing),
    "source": lambda _app: Source(emitting),
    "source, a def": lambda _app: Source(plain, every=1.0),
    "boot step": lambda _app: BootStep("bank", plain),
    "boot step, a class": lambda _app: BootStep("bank", Step),
    "boot step, its undo": lambda _app: BootStep("bank", open_bank, undo=taking),
    "service": lambda _app: service(RunStep),
    "service, an object": lambda _app: service(RunStep(), name="bank"),
    "workflow": lambda app: app.workflow(taking),
    "deduplicate": lambda app: app.task(deduplicate=plain)(nothing),
    "retry_backoff": lambda app: app.task(retry_backoff=taking)(nothing),
    "when_unpublishable": lambda _app: App("other", when_unpublishable=taking),
    "opener of another resource": lambda _app: Resource(plain),
    "check of a resource": lambda _app: Resource(open_bank, check=taking),
    "archive": lambda _app: Keep(full="archive", archive=archiving),
    "check of a stream": lambda app: app.stream("orders", dict).subscribe_check(check)(taking),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_task_may_not_take_a_resource(app_name: str, kind: str) -> None:
    with pytest.raises(
        Misconfigured, match=r"'bank' takes a resource, which only tasks get: let it"
    ) as caught:
        KINDS[kind](App(app_name))
    assert "\n" not in str(caught.value)


def test_a_task_of_every_kind_takes_one(app_name: str) -> None:
    app = App(app_name)
    tasks = [app.task(name="text")(by_text), app.task(name="boxed", boxed=True)(plain), app.task(awaited)]
    with recorded(app) as sent, replaced(open_bank, "bank"):
        for task in tasks:
            task.delay()
        assert sent.run() == [None, None, None]


class Vault(Bank):
    """A bank of a kind."""


class HasName(Protocol):
    """What has a name."""

    name: str


class Session:
    """Opens a bank."""

    def __enter__(self) -> Bank:
        raise NotImplementedError

    def __exit__(self, *_error: object) -> None: ...


def open_number() -> int:
    raise NotImplementedError


async def open_number_async() -> int:
    raise NotImplementedError


def yield_numbers() -> Iterator[int]:
    raise NotImplementedError


def yield_number() -> Iterator[int]:
    yield 1


async def yield_number_async() -> AsyncGenerator[int, None]:
    yield 1


@contextmanager
def hold_number() -> Generator[int]:
    yield 1


@asynccontextmanager
async def hold_number_async() -> "AsyncIterator[int]":
    yield 1


def open_any() -> Any:
    raise NotImplementedError


def open_either() -> Bank | int:
    raise NotImplementedError


def open_generic() -> dict[str, int]:
    raise NotImplementedError


def open_vault() -> Vault:
    raise NotImplementedError


def open_unknown():  # type: ignore[no-untyped-def]  # noqa: ANN201  that is what is tested
    raise NotImplementedError


def open_later() -> AbstractAsyncContextManager[Bank]:
    raise NotImplementedError


OPEN_NUMBER = [
    open_number,
    open_number_async,
    yield_number,
    yield_number_async,
    hold_number,
    hold_number_async,
    int,
]


@pytest.mark.parametrize("opener", OPEN_NUMBER)
def test_a_resource_of_another_type_than_its_parameter_is_refused(app_name: str, opener: Any) -> None:
    async def pay(bank: Annotated[Bank, Resource(opener)] = INJECTED) -> None: ...

    message = rf"task pay: parameter 'bank' is annotated with Bank, .* '{opener.__name__}' with int$"
    with pytest.raises(Misconfigured, match=message):
        App(app_name).task(name="pay")(pay)


FITTING: list[tuple[Any, Resource]] = [
    (Bank, Resource(open_bank)),
    (Bank, Resource(open_vault)),
    (Vault, Resource(open_bank)),  # narrower: it may be one
    (float, Resource(open_number)),
    (object, Resource(open_number)),
    (Any, Resource(open_number)),
    (HasName, Resource(open_number)),
    (Bank | None, Resource(open_number)),
    (Bank, Resource(open_any)),
    (Bank, Resource(open_either)),
    (Bank, Resource(open_unknown)),
    (Bank, Resource(lambda: Bank())),
    (Bank, Resource(Bank)),
    (Bank, Resource(Session)),
    (Bank, Resource(open_later, loop="trio")),
    (Mapping[str, int], Resource(open_generic)),
    (dict[str, str], Resource(open_generic)),
    (Iterator[int], Resource(yield_numbers)),
]


@pytest.mark.parametrize(("kind", "resource"), FITTING)
def test_a_resource_that_may_fit_its_parameter_is_let_through(
    app_name: str, kind: Any, resource: Resource
) -> None:
    async def pay(bank: Annotated[kind, resource] = INJECTED) -> None: ...

    assert App(app_name).task(pay).injected == {"bank": resource}
