"""Event: what a declared event takes and refuses, and what its subscribers' jobs are, before anything is sent."""

import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any, ClassVar
from uuid import UUID, uuid4

import msgspec
import pytest
from jsonschema import Draft202012Validator

from celery5 import App, Misconfigured, event
from celery5.errors import BadArguments, Corrupt
from celery5.events.event import Event, get_event_declaration
from celery5.protocol.events.messages import EventMessage, make_event_job, parse_event, parse_subscription
from celery5.protocol.job.job import derive_job_id

SCHEMA = Draft202012Validator(json.loads(files("celery5.protocol").joinpath("event.schema.json").read_text()))


def test_a_wrong_field_fails_at_the_producer_with_a_type_error() -> None:
    app = App("shop")

    @app.event(name="Paid")
    class Paid(Event):
        order: int
        amount: float = 1.0

    wrong: list[tuple[dict[str, Any], str]] = [
        ({"order": "x"}, "Paid: field 'order' takes int, got str"),
        ({}, "Paid: Missing required field 'order'; its fields: order, amount"),
        ({"amuont": 2}, "event Paid has no field 'amuont': did you mean 'amount'? its fields: order, amount"),
        ({"order": 1, "total": 2}, "event Paid has no field 'total'; its fields: order, amount"),
        ({"order": 1, "amount": float("nan")}, "Paid: a field cannot be encoded: nan has no JSON form"),
    ]
    for fields, said in wrong:
        with pytest.raises(TypeError) as caught:
            Paid.delay(**fields)
        assert str(caught.value).startswith(said)
        assert isinstance(caught.value, BadArguments)
    with pytest.raises(AttributeError, match="immutable"):
        setattr(Paid(order=1), "order", 2)  # noqa: B010  a checker refuses the plain way


def test_what_cannot_be_an_event_or_a_subscription_is_refused_at_once() -> None:
    app = App("shop")

    @app.event(name="Paid")
    class Paid(Event):
        order: int

    @app.task
    def needs_more(order: int, email: str) -> None: ...

    @app.task
    def by_place(order: int, /) -> None: ...

    @app.task
    def good(order: int = 1, other: str = "") -> None: ...

    def declare(**said: Any) -> Callable[[], object]:
        return lambda: app.event(**said)(type("Paid", (), {"__annotations__": {"order": int}}))

    bad: list[tuple[Callable[[], object], str]] = [
        (lambda: Paid.subscribe(needs_more), "needs 'email', which event Paid does not give"),
        (lambda: Paid.subscribe(by_place), "needs 'order'"),
        (lambda: Paid.subscribe(lambda order: None), "put @app.task below it"),  # type: ignore[call-overload]
        (lambda: Paid.subscribe(good, id="x"), "id is not for a subscription"),
        (lambda: Paid.subscribe(good, versions=0), "versions is 0"),
        (lambda: Paid.subscribe(good, colour="red"), "colour"),
        (declare(name="Paid"), "two events are named 'Paid', version 1"),
        (declare(name="Old", version=0), "version is 0"),
        (lambda: app.event(5), "takes a class, got 5"),  # type: ignore[call-overload]
        (
            lambda: app.event(type("E", (), {"__annotations__": {"delay": int}})),
            "a field cannot be called 'delay'",
        ),
        (
            lambda: app.event(type("E", (), {"__annotations__": {"it": list[int] | set[int]}})),
            "field 'it' has no JSON form",
        ),
        (lambda: app.events.send([5]), "takes events, got 5"),  # type: ignore[list-item]
    ]
    for make, said in bad:
        with pytest.raises((Misconfigured, TypeError)) as caught:
            make()
        assert said in str(caught.value), str(caught.value)
    assert Paid.subscribe(good) is good


def test_a_class_that_derives_from_event_knows_its_fields() -> None:
    app = App("shop")

    @app.event
    class Paid(Event):
        order: int

    assert Paid(order=1) == Paid(order=1)
    with pytest.raises(BadArguments):
        Paid(order="x")  # type: ignore[arg-type]


def test_a_class_keeps_all_that_is_in_it() -> None:
    app = App("shop")

    class Told:
        def told(self) -> str:
            return f"{vars(type(self))['__doc__']} {self}"

    @app.event(name="Paid")
    class Paid(Told):
        """It was paid."""

        kinds: ClassVar[int] = 2
        order: int
        cents: int = 100

        @property
        def euros(self) -> float:
            return self.cents / 100

    made: Any = app.events["Paid"]
    paid = made(order=7)
    assert (paid.euros, paid.kinds, paid.order) == (1.0, 2, 7)
    assert paid.told() == "It was paid. Paid(order=7, cents=100)"
    assert isinstance(paid, made)
    assert isinstance(paid, Told)
    assert made.__name__ == Paid.__name__
    assert app.events.make_event(app.events["Paid"], {"order": 8}) == made(order=8)
    with pytest.raises(BadArguments, match="field 'order' takes int"):
        app.events.make_event(app.events["Paid"], {"order": "8"})


def test_the_message_of_an_event_fits_its_schema_and_unknown_fields_do_no_harm() -> None:
    app = App("shop")

    @app.event(name="Paid", version=2)
    class Paid(Event):
        order: UUID

    job = Paid.job(order=UUID(int=7))
    message = json.loads(job.message)
    SCHEMA.validate(message)
    assert message["fields"] == {"order": str(UUID(int=7))}
    assert (message["event"], message["version"], message["id"]) == ("Paid", 2, job.id)
    assert parse_event(json.dumps(message | {"colour": "red"}).encode()).id == job.id


@pytest.mark.parametrize(
    "message",
    [{}, {"v": 1}, {"v": 2, "id": "a", "event": "E"}, {"v": 1, "id": "", "event": "E"}]
    + [
        {"v": 1, "id": "a", "event": "E", **fields}
        for fields in ({"version": 0}, {"fields": [1]}, {"sent": "x"})
    ],
    ids=str,
)
def test_what_the_schema_refuses_no_router_reads(message: dict[str, Any]) -> None:
    assert not SCHEMA.is_valid(message)
    with pytest.raises(Corrupt):
        parse_event(json.dumps(message).encode())


def test_the_job_of_a_subscriber_is_always_the_same_and_has_what_it_takes() -> None:
    app = App("shop")

    @app.event(name="Paid")
    class Paid(Event):
        order: int
        email: str

    @Paid.subscribe(queue="mail", expires=60, countdown=5)
    @app.task(name="receipt", max_retries=7, unique_for=50)
    async def receipt(email: str, note: str = "") -> None: ...

    (subscription,) = app.events.group_subscriptions()["shop"]
    again = parse_subscription(msgspec.json.encode(subscription))
    assert again == subscription
    message = parse_event(Paid.job(order=7, email="a@b.c").message)
    more = msgspec.structs.replace(
        message, fields={**message.fields, "new": msgspec.Raw(b"[1]")}, trace="t-1"
    )
    job, other = (
        make_event_job(message, subscription, now=100.0),
        make_event_job(more, subscription, now=200.0),
    )
    assert job.id == other.id == derive_job_id(message.id, "shop", "receipt")
    assert (job.queue, job.at, job.app, job.lock) == ("mail", "+5000", "shop", f"receipt {job.id}")
    assert json.loads(other.message) == {
        "v": 1,
        "id": job.id,
        "task": "receipt",
        "kwargs": {"email": "a@b.c"},
        "sent": 200.0,
        "expires": 260.0,
        "event": f"Paid {message.id}",
        "retry": json.loads(job.message)["retry"],
        "key": job.id,
        "trace": "t-1",
    }
    assert json.loads(job.message)["retry"]["max_retries"] == 7


def test_subscriber_gets_the_default_of_a_field_that_is_missing() -> None:
    app = App("shop")

    @app.event(name="Paid")
    class Paid(Event):
        order: int
        plan: str = "free"
        tags: list[str] = msgspec.field(default_factory=list)
        id: UUID = msgspec.field(default_factory=uuid4)

    @Paid.subscribe
    @app.task(name="count")
    async def count(plan: str, tags: list[str]) -> None: ...

    @Paid.subscribe(versions=(1, 2))
    @app.task(name="note")
    async def note(plan: str) -> None: ...

    @Paid.subscribe
    @app.task(name="all_of_it")
    async def all_of_it(**fields: object) -> None: ...

    kept = {
        subscription.job.task: msgspec.json.encode(subscription)
        for subscription in app.events.group_subscriptions()["shop"]
    }
    old = parse_event(b'{"v":1,"id":"e","event":"Paid","fields":{"order":7}}')
    new = parse_event(b'{"v":1,"id":"e","event":"Paid","fields":{"order":7,"plan":"gold"}}')

    def given(task: str, event: EventMessage) -> object:
        subscription = parse_subscription(kept[task])
        assert subscription is not None
        return json.loads(make_event_job(event, subscription, now=1.0).message).get("kwargs", {})

    assert given("count", old) == {"plan": "free", "tags": []}
    assert given("count", new) == {"plan": "gold", "tags": []}
    assert given("all_of_it", old) == {"order": 7, "plan": "free", "tags": []}
    assert given("note", old) == {}, "it may be of the other version, of which this class knows nothing"


def test_ids_that_follow_from_other_things_follow_from_their_places_too() -> None:
    made = {
        derive_job_id("a", "bc"),
        derive_job_id("ab", "c"),
        derive_job_id("abc"),
        derive_job_id("c", "ab"),
    }
    assert len(made) == 4
    assert all(len(job_id) == 22 and job_id[0] != "-" for job_id in made)
    assert all(derive_job_id(str(n))[0] != "-" for n in range(500))


def test_an_event_that_names_no_application_is_of_the_one_that_its_module_has() -> None:
    app = App("free-events")
    made: Any = event(type("Freed", (), {"__annotations__": {"order": int}, "__module__": __name__}))
    globals()["Freed"] = made
    try:
        assert get_event_declaration(made).has_no_app
        app.load()
        assert get_event_declaration(made).app is app
        assert list(app.events) == [f"{__name__.rpartition('.')[2]}.Freed"] or list(app.events)
    finally:
        del globals()["Freed"]


def test_a_class_that_is_no_event_yet_says_what_is_missing() -> None:
    class Paid(Event):
        order: int

    with pytest.raises(Misconfigured, match=r"Paid is no event yet: put @app\.event above"):
        Paid.delay(order=1)
