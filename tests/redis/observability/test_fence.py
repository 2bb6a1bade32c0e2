"""The fence: whatever fails in what only observes is logged once and counted, and changes nothing else."""

from collections.abc import Iterator
from typing import Any

import eliot
import pytest
import trio

from celery5 import App, TaskFailed
from celery5.logs import trace
from celery5.logs.fence import FENCE
from celery5.services.commands.log_retry import LogRetry
from celery5.services.health.vital_sources import QueueDepths
from celery5.services.health.vitals import ProcessStatus, StatusPhase
from celery5.services.job import attempt_recorder
from celery5.services.job.outcome_handler import OutcomeHandler
from celery5.services.observability.alert_delivery import AlertDelivery
from celery5.services.observability.alert_evaluator import AlertEvaluator
from celery5.services.observability.ended_counter import EndedCounter
from celery5.services.observability.history_rollup import HistoryRollup
from celery5.services.observability.metrics_reporter import MetricsReporter
from celery5.services.process import fenced
from celery5.services.process.systemd_notify import SystemdNotify
from celery5.services.scaling.reporter import Reporter
from celery5.services.streams.group_lags import GroupLags
from celery5.services.worker.progress_reports import ProgressReports
from tests.redis.worker.workers import Lines, until, working

OBSERVERS: dict[str, Any] = {
    "progress": ProgressReports,
    "metrics": MetricsReporter,
    "history": HistoryRollup,
    "ended": EndedCounter,
    "alerts": AlertEvaluator,
    "notices": AlertDelivery,
    "log-again": LogRetry,
    "depths": QueueDepths,
    "lags": GroupLags,
    "reporter": Reporter,
    "vitals": StatusPhase,
    "systemd": SystemdNotify,
}


@pytest.fixture(autouse=True)
def _fresh_fence() -> Iterator[None]:
    """Each test begins with nothing counted, and nothing logged."""
    FENCE.take_counts()
    FENCE.forget_logged()
    yield
    FENCE.take_counts()
    FENCE.forget_logged()


@pytest.mark.parametrize("error", [OverflowError("too big"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
async def test_observers_that_fail_again_and_again_end_no_worker(
    app: App, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    tries: list[str] = []

    def break_down(name: str) -> Any:
        async def run(self: Any, *, task_status: Any) -> None:
            tries.append(name)
            raise error

        return run

    for name, service in OBSERVERS.items():
        monkeypatch.setattr(service, "run", break_down(name))
    monkeypatch.setattr(fenced, "FIRST_PAUSE", 0.01)

    @app.task
    async def add(a: int, b: int) -> int:
        return a + b

    with Lines() as lines:
        async with working(app) as worker:
            assert await (await add.adelay(1, 2)).aget(60) == 3
            await until(lambda: all(tries.count(name) > 1 for name in OBSERVERS))
            assert await (await add.adelay(3, 4)).aget(60) == 7
            assert not worker.ended.is_set()
    told = lines.of("observer:failed")
    assert sorted(line["observer"] for line in told) == sorted(OBSERVERS)
    families = {family.name: family for family in ProcessStatus().metric_families()}
    counted = families["celery5_observer_failures_total"].samples
    assert {sample.labels["observer"] for sample in counted} == set(OBSERVERS)
    assert all(sample.value > 1 for sample in counted)


@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
async def test_a_log_destination_of_the_applications_own_that_fails_ends_no_worker(
    app: App, error: BaseException
) -> None:
    def fail(_message: Any) -> None:
        raise error

    @app.task
    async def works() -> int:
        return 1

    @app.task(retry_policy={"max_retries": 0})
    async def fails() -> None:
        raise ValueError("no")

    # Eliot sends what it kept for the first destination of a process at once: let that be another one.
    with Lines():
        pass
    async with working(app) as worker:
        eliot.add_destinations(fail)
        try:
            for _ in range(3):
                assert await (await works.adelay()).aget(60) == 1
                with pytest.raises(TaskFailed, match="not-retried"):
                    await (await fails.adelay()).aget(60)
            assert not worker.ended.is_set()
        finally:
            eliot.remove_destination(fail)


async def test_a_history_and_a_count_that_cannot_be_made_harm_no_job(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: Any, **_more: Any) -> None:
        raise OverflowError("can't serialize ints")

    monkeypatch.setattr(attempt_recorder, "make_attempt_record", fail)

    @app.task
    async def works() -> int:
        return 1

    @app.task(retry_policy={"max_retries": 1, "backoff": 0.0})
    async def fails() -> None:
        raise ValueError("no")

    async with working(app) as worker:
        assert await (await works.adelay()).aget(60) == 1
        with pytest.raises(TaskFailed, match="exhausted"):
            await (await fails.adelay()).aget(60)
        monkeypatch.setattr(OutcomeHandler, "_count_and_log", fail)
        assert await (await works.adelay()).aget(60) == 1
        assert not worker.ended.is_set()
        counts = FENCE.take_counts()
    assert counts["history"] >= 2
    assert counts["job-end"] >= 1


async def test_a_job_is_sent_although_its_trace_cannot_be_found(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> str:
        raise RuntimeError("no trace")

    monkeypatch.setattr(trace, "_GET_ELIOT_CONTEXT", [fail])

    @app.task
    async def nothing() -> None: ...

    with eliot.start_action(action_type="shop:request"):
        sent = await nothing.adelay()
    assert FENCE.take_counts()["trace"] == 1
    async with working(app):
        await sent.aget(60)


async def test_a_cancellation_passes_the_fence() -> None:
    with trio.move_on_after(0.01) as scope:
        with FENCE("history"):
            await trio.sleep_forever()
        pytest.fail("the cancellation was swallowed")
    assert scope.cancelled_caught


def test_an_error_is_logged_once_for_each_observer_and_class(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "celery5"):
        for error in (ValueError("a"), ValueError("b"), KeyError("c")):
            with FENCE("history"):
                raise error
        with FENCE("metrics"):
            raise ValueError("d")
    assert [record.getMessage().split()[1] for record in caplog.records] == [
        "observer=history",
        "observer=history",
        "observer=metrics",
    ]
    assert FENCE.take_counts() == {"history": 3, "metrics": 1}
    assert FENCE.take_counts() == {}
