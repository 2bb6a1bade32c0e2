"""Unique calls: which calls of a task count as the same, and what a job says of its key and its id."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from celery5 import App, Misconfigured
from celery5.errors import Corrupt
from celery5.protocol.job.messages import read_command
from celery5.tasks import Job

ORDER = UUID("12345678-1234-5678-1234-567812345678")


@dataclass
class Item:
    """Something with a default."""

    name: str
    count: int = 1


@pytest.fixture
def app() -> App:
    """An application that is not connected to anything: nobody listens on that port."""
    return App("shop", broker="redis://127.0.0.1:1/0")


def key(task: Any, *args: Any, **kwargs: Any) -> str:
    """The key of a call that is unique for a minute and was given none."""
    return read_command(task.options(unique_for=60).job(*args, **kwargs).message).key


def test_calls_that_mean_the_same_have_one_key(app: App) -> None:
    @app.task
    def pack(
        order: UUID, *more: float, items: list[Item] | None = None, fast: bool = False, **rest: Any
    ) -> None: ...

    same = [
        key(pack, ORDER),
        key(pack, order=ORDER),
        key(pack, ORDER, fast=False),
        key(pack, ORDER, fast=False, items=None),
        key(pack, ORDER, items=None),
    ]
    assert len(set(same)) == 1
    assert key(pack, ORDER, 1.0, a={"x": 1, "y": 2}, b=2) == key(pack, ORDER, 1, b=2, a={"y": 2, "x": 1})
    assert key(pack, ORDER, items=[Item("a")]) == key(pack, ORDER, items=[Item("a", 1)])


def test_calls_that_mean_something_else_have_another(app: App) -> None:
    @app.task
    def pack(order: Any, count: int = 1, *more: int, **rest: Any) -> None: ...

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((7,), {}), (("7",), {}), ((7, 2), {}), ((7, 1, 2), {}), ((7,), {"x": 1}), ((7,), {"y": 1}), (([7],), {}),
    ]  # fmt: skip
    assert len({key(pack, *args, **kwargs) for args, kwargs in calls}) == len(calls)


def test_a_default_that_has_no_json_form_is_nobodys_argument(app: App) -> None:
    nothing: Any = object()

    @app.task
    def pack(order: int, path: Any = nothing) -> None: ...

    assert key(pack, 7) == key(pack, order=7) != key(pack, 7, Path("x"))


def test_a_key_and_an_id_that_are_given_are_the_jobs(app: App) -> None:
    @app.task(unique_for=timedelta(minutes=1))
    def pack(order: int) -> None: ...

    job = pack.options(key="order-7", id="pack-7").job(7)
    command = read_command(job.message)
    assert (job.id, command.id, command.key) == ("pack-7", "pack-7", "order-7")
    assert (job.lock, job.unique_for) == (f"{pack.name} order-7", 60.0)
    assert pack.options(key="order-7").s(7).job().id != pack.options(key="order-7").s(7).job().id
    plain = app.task(name="plain")(lambda: None).job()
    assert (plain.lock, plain.unique_for, read_command(plain.message).key) == ("", None, "")


@pytest.mark.parametrize("name", ["key", "id"])
@pytest.mark.parametrize("wrong", ["", "x" * 201, 7, UUID(int=7), "a\udc80"], ids=ascii)
def test_a_key_and_an_id_are_texts_of_a_sensible_length(app: App, name: str, wrong: Any) -> None:
    with pytest.raises(Misconfigured, match=f"^{name} is .*1 to 200 characters"):
        app.task(lambda: None).options(**{name: wrong})


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ({}, None),
        ({"unique_for": 60}, None),
        ({"unique_for": 7200}, 7200.0),
        ({"unique_for": 7200, "results_ttl": 5}, 5.0),
    ],
    ids=str,
)
def test_a_result_is_kept_for_as_long_as_others_are_given_its_handle(
    app: App, said: dict[str, Any], kept: float | None
) -> None:
    task = app.task(name="kept", **said)(lambda: None)
    assert read_command(task.job().message).results_ttl == kept


def test_a_job_can_be_kept_as_bytes_and_comes_back_the_same(app: App) -> None:
    job = app.task(name="kept")(lambda: None).options(key="k", unique_for=5, countdown=3).job()
    assert Job.from_bytes(job.to_bytes()) == job
    for wrong in (b"", b"{}", b"\xff", b'{"id": 7}'):
        with pytest.raises(Corrupt, match="not a job"):
            Job.from_bytes(wrong)
