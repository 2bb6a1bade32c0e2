"""Result: what a document means to whoever waits for it."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import Raw

from celery5 import App, AsyncResult, JobState, Misconfigured, ResultTimeout, TaskFailed
from celery5.broker.calls.jobs import LocatedJob
from celery5.broker.colour import run_blocking
from celery5.errors import BadResult, Corrupt
from celery5.protocol.job.arguments import ResultType
from celery5.protocol.job.messages import Document, Failure, encode
from celery5.results import waiting
from celery5.results.async_result import (
    _enough,
    _in_order,
    _parted,
    agather,
    gather,
    get_job_state,
    make_task_error,
    wait,
    wait_async,
)

APP = App("results")


def handle(job_id: str, annotation: Any = Any) -> AsyncResult[Any]:
    """The handle of a job."""
    return AsyncResult(APP, job_id, queue="mail", task="shop.t", type=ResultType(annotation))


def document(job_id: str, state: str = "SUCCESS", value: bytes = b"null", **more: Any) -> bytes:
    """A job's document."""
    return encode(Document(v=1, id=job_id, task="shop.t", state=state, value=Raw(value), **more))


FAILURE = Failure(type="ValueError", message="no", args=("no",), traceback="Traceback ...", worker="w")
DEAD = document("a", "DEAD", failure=FAILURE, reason="exhausted", attempt=4, worker="w")


def test_a_handle_is_its_id() -> None:
    assert handle("a") == handle("a", int) != handle("b")
    assert len({handle("a"), handle("a"), handle("b")}) == 2
    assert handle("a") != "a"
    assert repr(handle("a")) == "<AsyncResult a>"
    assert handle("a").key == APP.queue("mail").result("a")


def test_a_handle_can_be_made_again() -> None:
    @APP.task(name="typed", queue="mail")
    def typed() -> set[int]:
        return set()

    again = APP.result("a", queue="mail", task=typed)
    assert again == handle("a")
    assert again.outcome(document("a", value=b"[1,1]")) == {1}
    assert APP.result("a").queue == "default"
    assert APP.result("a", task=typed).queue == "mail"
    assert APP.result("a", task=typed.options(queue="post")).queue == "post"
    assert APP.result("a", queue="post", task=typed).queue == "post"
    placed = [
        APP.result("a").is_located,
        APP.result("a", task=typed).is_located,
        APP.result("a", queue="x").is_located,
    ]
    assert placed == [False, False, True]
    anything: AsyncResult[Any] = APP.result("a")
    assert anything.outcome(document("a", value=b"[1]")) == [1]


def test_a_result_is_converted_as_the_task_declares() -> None:
    assert handle("a", set[int]).outcome(document("a", value=b"[1,2]")) == {1, 2}
    assert handle("a").outcome(document("a")) is None


def test_a_dead_job_is_an_error_that_tells_everything() -> None:
    error = handle("a").outcome(DEAD)
    assert isinstance(error, TaskFailed)
    assert str(error) == "shop.t[a] failed at attempt 4 (exhausted): ValueError: no"
    told = (error.job_id, error.task, error.type, error.message, error.error_args, error.traceback)
    assert told == ("a", "shop.t", "ValueError", "no", ("no",), "Traceback ...")
    assert (error.attempt, error.worker, error.reason) == (4, "w", "exhausted")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("EXPIRED", "expired before it could start"),
        ("REVOKED", "was revoked"),
        ("REJECTED", "was rejected: rejected"),
    ],
)
def test_a_job_that_ended_otherwise_is_an_error_too(state: str, said: str) -> None:
    error = handle("a").outcome(document("a", state))
    assert isinstance(error, TaskFailed)
    assert (str(error), error.args) == (f"shop.t[a] {said}", (str(error),))
    assert (error.type, error.message) == (state.title(), state.lower())
    assert make_task_error(Document(v=1, id="a", task="t", state=state, reason="why")).message == "why"


def test_what_cannot_be_read_is_an_error_of_its_own() -> None:
    bad = handle("a", int).outcome(document("a", value=b'"x"'))
    assert isinstance(bad, BadResult)
    assert str(bad) == (
        "shop.t[a] succeeded, but the result is not what the task declares, int: got str; either its "
        "worker declares the task otherwise, or the task returned something else than it declares"
    )
    assert isinstance(handle("a").outcome(b"nonsense"), Corrupt)


@pytest.mark.parametrize(
    ("place", "state"),
    [
        *[(LocatedJob(state.value, "", b""), state) for state in JobState],
        (LocatedJob("EXECUTING", "w", b""), JobState.EXECUTING),
        (LocatedJob("ENDED", "", document("a")), JobState.SUCCESS),
        (LocatedJob("ENDED", "", document("a", "EXPIRED")), JobState.EXPIRED),
        (LocatedJob("DEAD", "", DEAD), JobState.DEAD),
    ],
)
def test_a_place_means_a_state(place: LocatedJob, state: JobState) -> None:
    assert get_job_state(place) is state


def test_gather_keeps_the_order_and_stands_in_for_what_failed_or_is_late() -> None:
    results = [handle("b", int), handle("a"), handle("c", int), handle("d", int)]
    found = {
        results[0].key: document("b", value=b"7"),
        results[1].key: DEAD,
        results[3].key: document("d", value=b'"x"'),
    }
    seven, dead, late, bad = _in_order(results, found, 1.5, True)
    assert seven == 7
    assert isinstance(dead, TaskFailed)
    assert isinstance(late, ResultTimeout)
    assert str(late) == "shop.t[c]: no result after 1.5 s"
    assert isinstance(bad, BadResult)
    with pytest.raises(TaskFailed):
        _in_order(results, found, 1.5, False)
    with pytest.raises(ResultTimeout):
        _in_order(results[::-1][1:], found, 1.5, False)


def test_nothing_to_wait_for_is_no_trip() -> None:
    assert gather([]) == []
    assert wait([]) == (set(), set())


def test_wait_parts_those_that_ended_from_those_that_have_not() -> None:
    results = [handle("a"), handle("b")]
    assert _parted(results, {results[1].key: b""}) == ({results[1]}, {results[0]})


def test_when_enough_have_ended() -> None:
    assert _enough("ALL_COMPLETED") is None
    first, failed = _enough("FIRST_COMPLETED"), _enough("FIRST_EXCEPTION")
    assert first is not None
    assert failed is not None
    assert [first({}), first({"k": document("a")})] == [False, True]
    assert [failed({}), failed({"k": document("a")}), failed({"k": document("b"), "l": DEAD})] == [
        False,
        False,
        True,
    ]
    with pytest.raises(Misconfigured, match="return_when is 'SOME': use ALL_COMPLETED"):
        _enough("SOME")  # type: ignore[arg-type]


def test_wait_lasts_as_long_as_its_limit_and_for_ever_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeouts = list[float | None]()

    async def wait_for_results(
        _app: object, keys: Sequence[str], *, timeout: float | None, enough: object
    ) -> dict[str, bytes]:
        timeouts.append(timeout)
        return dict.fromkeys(keys, document("a"))

    monkeypatch.setattr(waiting, "wait_for_results", wait_for_results)
    for limit in (None, 0, 0.5, 7, 86_400):
        handle("a").get(limit)
        gather([handle("a")], timeout=limit)
        wait([handle("a")], timeout=limit)
        run_blocking(handle("a").aget(limit))
        run_blocking(agather([handle("a")], timeout=limit))
        run_blocking(wait_async([handle("a")], timeout=limit))
        assert timeouts == [limit] * 6
        timeouts.clear()
    handle("a").get()
    gather([handle("a")])
    wait([handle("a")])
    run_blocking(handle("a").aget())
    run_blocking(agather([handle("a")]))
    run_blocking(wait_async([handle("a")]))
    assert timeouts == [10.0, 10.0, None] * 2, "what is usual: only wait waits for ever"
