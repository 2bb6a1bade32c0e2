"""Testing kit: what `celery5.testing` promises to the tests of an application, tried as such tests would."""

import asyncio
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from decimal import Decimal
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import trio

from celery5 import (
    App,
    BootStep,
    BrokerUnavailable,
    Event,
    Misconfigured,
    Reject,
    Retry,
    current_job,
    service,
)
from celery5.errors import BadArguments, BadResult, BlockingInEventLoop, BootStepFailed
from celery5.tasks import CurrentJob
from celery5.testing import Recorded, arunning_steps, as_job, recorded, running_steps, running_worker
from celery5.workflows import StepFailure
from tests.story.cli.commands import environment

NOBODY = "redis://127.0.0.1:1/0"
"""Where no server is."""


class Shop:
    """A small application, with tasks of each kind and an event."""

    def __init__(self, broker: str = NOBODY) -> None:
        self.app = app = App("shop", broker=broker, backlog=0)
        self.mails: list[int] = []

        @app.event
        class OrderPaid(Event):
            order: int

        @app.task
        async def charge(order: int, amount: Decimal = Decimal(1)) -> int:
            await OrderPaid.adelay(order=order)
            await pack.options(countdown=60, queue="cpu").adelay(order)
            return order * 2

        @app.task
        def pack(order: int) -> str:
            job = current_job()
            assert job is not None
            return f"{order} by {job.worker}"

        @OrderPaid.subscribe
        @app.task(loop="asyncio")
        async def mail(order: int) -> None:
            self.mails.append(order)

        @app.task(bind=True)
        async def patient(self: CurrentJob, order: int) -> int:
            if self.attempt < 3:
                self.retry(countdown=5)
            return self.attempt

        self.charge, self.pack, self.mail, self.patient, self.paid = charge, pack, mail, patient, OrderPaid


def test_what_is_sent_is_recorded_and_needs_no_broker() -> None:
    shop = Shop()
    with recorded(shop.app) as sent:
        handle = shop.charge.options(key="order-7", priority="high").delay(7, amount=Decimal("9.90"))
        shop.app.send_many([shop.pack.s(1), shop.pack.s(2)])
        shop.app.send_jobs([shop.pack.job(3)])
        shop.paid.delay(order=9)
    (one,) = sent.jobs_of(shop.charge)
    assert (one.id, one.task, one.queue, one.arguments) == (
        handle.id,
        shop.charge.name,
        "default",
        {"order": 7, "amount": Decimal("9.90")},
    )
    assert (one.key, one.priority, one.countdown) == ("order-7", "high", None)
    assert [job.arguments for job in sent.jobs_of(shop.pack)] == [{"order": 1}, {"order": 2}, {"order": 3}]
    assert sent.events_of(shop.paid) == [shop.paid(order=9)]
    with pytest.raises(BrokerUnavailable):
        shop.charge.delay(7)
    assert len(sent.jobs) == 4


async def test_recording_works_in_every_colour_and_refuses_what_sending_does() -> None:
    shop = Shop()
    with recorded(shop.app) as sent:
        await shop.charge.adelay(7)
        assert await shop.charge(8) == 16
        with pytest.raises(BlockingInEventLoop):
            shop.charge.delay(7)
        with pytest.raises(BadArguments):
            await shop.charge.adelay("seven")  # type: ignore[arg-type]
        with recorded(shop.app) as inner:
            await shop.pack.adelay(1)
        await shop.pack.adelay(2)
    assert [job.arguments for job in inner.jobs] == [{"order": 1}]
    assert [job.task for job in sent.jobs] == [shop.charge.name, shop.pack.name, shop.pack.name]
    due = sent.jobs_of(shop.pack)[0].countdown
    assert due is not None
    assert 59 <= due <= 61
    assert sent.jobs_of(shop.pack)[0].queue == "cpu"


def test_what_was_recorded_runs_here_with_all_that_it_sends() -> None:
    shop = Shop()
    with recorded(shop.app) as sent:
        shop.charge.delay(7)
        assert sent.run() == [14, "7 by test", None]
        assert sent.run() == []
    assert shop.mails == [7]


def test_a_job_that_runs_here_fails_as_it_is_and_its_result_is_checked() -> None:
    shop = Shop()

    @shop.app.task
    def wrong() -> int:
        return "seven"  # type: ignore[return-value]

    @shop.app.task
    def forever() -> None:
        forever.delay()

    with recorded(shop.app) as sent:
        wrong.delay()
        with pytest.raises(BadResult):
            sent.run()
        sent.clear()
        forever.delay()
        with pytest.raises(Misconfigured, match="do their tasks send each other"):
            sent.run()


def test_a_job_that_fails_here_has_its_failure_task_called_before_the_error_is_raised() -> None:
    shop = Shop()
    told: list[tuple[str, StepFailure]] = []

    @shop.app.task
    def notify(failures: list[StepFailure], team: str) -> None:
        told.append((team, failures[0]))

    @shop.app.task
    def broken(failures: list[StepFailure]) -> None:
        raise OSError("no mail")

    @shop.app.task(on_failure=notify.partial("ops"))
    def fail(how: str) -> None:
        raise Reject("no card") if how == "rejected" else Retry() if how == "retried" else LookupError(how)

    with recorded(shop.app) as sent:
        ids = [fail.delay(how).id for how in ("unknown", "rejected", "retried")]
        shop.pack.delay(1)
        with pytest.raises(LookupError, match="unknown"):
            sent.run()
        with pytest.raises(Reject):
            sent.run()
        assert [
            (team, failure.id, failure.type, failure.message, failure.reason) for team, failure in told
        ] == [
            ("ops", ids[0], "LookupError", "unknown", "exhausted"),
            ("ops", ids[1], "Reject", "no card", "not-retried"),
        ]
        with pytest.raises(Retry):
            sent.run()
        assert sent.run() == ["1 by test"]
        assert len(told) == len(sent.jobs_of(notify)) == 2, "one that asks for a retry is not dead"
        fail.options(on_failure=broken).delay("twice")
        with pytest.raises(LookupError, match="twice") as caught:
            sent.run()
        assert "its on_failure job of" in caught.value.__notes__[0]


async def test_a_bound_task_is_called_as_any_attempt() -> None:
    shop = Shop()
    with as_job(shop.patient, attempt=3) as job:
        assert await shop.patient(7) == 3
        assert current_job() is job
    assert current_job() is None
    with as_job(attempt=2), pytest.raises(Retry) as asked:
        await shop.patient(7)
    assert asked.value.countdown == 5


def test_a_worker_runs_in_this_process_with_a_server_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY5_BROKER", NOBODY)  # a test never meets a server that matters
    shop = Shop()
    with running_worker(shop.app) as url:
        assert url.startswith("unix:")
        assert shop.charge.delay(7).get(timeout=30) == 14

        async def ask() -> int:
            return await (await shop.charge.adelay(8)).aget(timeout=30)

        assert trio.run(ask) == 16
    with pytest.raises(BrokerUnavailable):
        shop.charge.delay(7)


def test_fixtures_start_workers_and_record(
    celery5_worker: Callable[[App], None], celery5_recorded: Callable[[App], Recorded]
) -> None:
    shop, silent = Shop(), Shop()
    celery5_worker(shop.app)
    sent = celery5_recorded(silent.app)
    assert shop.pack.delay(7).get(timeout=30).startswith("7 by ")
    silent.pack.delay(8)
    assert len(sent.jobs) == 1


def with_steps(*, fails: bool = False) -> App:
    """An application with a step, a service that requires it, and one step that may fail."""
    seen: list[str] = []

    async def rates() -> dict[str, float]:
        return {"EUR": 1.0}

    async def close(rates: dict[str, float]) -> None:
        rates.clear()

    async def load() -> None:
        if fails:
            raise ConnectionError("no database")

    class Watch:
        def __init__(self, *, rates: dict[str, float]) -> None:
            self.rates = rates

        async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
            seen.append("up")
            task_status.started()
            await trio.sleep_forever()

    steps = [BootStep("the-rates", rates), BootStep("rates", rates, undo=close), BootStep("load", load)]
    return App("bureau", bootsteps=steps, services=[service(Watch, requires=["rates", "publishing"])])


async def test_boot_steps_are_brought_up_without_a_worker_and_taken_down_again() -> None:
    async with arunning_steps(with_steps()) as values:
        rates = values["rates"]
        assert rates == values["the-rates"] == {"EUR": 1.0}
        assert values["watch"].rates is rates
    assert rates == {}


def test_boot_steps_are_brought_up_in_plain_python_and_fail_as_in_a_worker() -> None:
    with running_steps(with_steps()) as values:
        assert values["rates"] == {"EUR": 1.0}
    with pytest.raises(BootStepFailed, match="no database"), running_steps(with_steps(fails=True)):
        raise AssertionError("they are not up")
    with pytest.raises(ZeroDivisionError), running_steps(with_steps()):
        _ = 1 / 0


@pytest.mark.parametrize("colour", ["plain", "trio", "asyncio"])
def test_without_a_broker_a_direct_call_that_sends_fails_in_few_lines(colour: str) -> None:
    shop = Shop()
    calls: dict[str, Callable[[], object]] = {
        "plain": lambda: shop.pack.delay(7),
        "trio": lambda: trio.run(shop.charge, 7),
        "asyncio": lambda: asyncio.run(shop.charge(7)),
    }
    with pytest.raises(BrokerUnavailable) as caught:
        calls[colour]()
    text = "".join(traceback.format_exception(caught.value))
    ours = [line for line in text.splitlines() if "celery5/" in line and "/tests/" not in line]
    assert "The above exception" not in text
    assert len(ours) <= 4, text
    assert "Connection refused" in text
    assert text.splitlines()[-1].startswith("A test needs no broker: celery5.testing.recorded(app)")


def test_the_testing_kit_does_not_load_pytest() -> None:
    code = "import sys, celery5.testing; celery5.testing.recorded; print('pytest' in sys.modules)"
    run = [sys.executable, "-c", code]
    completed = subprocess.run(run, env=environment(), capture_output=True, text=True, timeout=60, check=True)
    assert completed.stdout == "False\n"


def test_the_tests_that_the_guide_shows_pass(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "guide" / "testing.md").read_text()
    files = dict(re.findall(r'(?ms)^```python title="([^"]+)"\n(.*?)^```$', page))
    for name in ("shop.py", "test_shop.py"):
        (tmp_path / name).write_text(files[name])
    run = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "test_shop.py"]
    ended = subprocess.run(
        run, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False
    )
    assert "3 passed" in ended.stdout, ended.stdout + ended.stderr


def test_the_fixtures_have_an_entry_point_and_load_nothing_before_they_are_used(tmp_path: Path) -> None:
    (plugin,) = entry_points(group="pytest11", name="celery5.testing.pytest")
    (tmp_path / "test_loaded.py").write_text(
        "import sys\n"
        "def test_little_was_loaded():\n"
        "    loaded = {name for name in sys.modules if name.split('.')[0] in ('celery5', 'trio', 'eliot')}\n"
        "    assert loaded <= {'celery5', 'celery5.lazy', 'celery5.testing', 'celery5.testing.pytest'}\n"
        "def test_a_fixture(celery5_replaced):\n"
        "    from celery5.runners.open_resources import REPLACED_RESOURCES\n"
        "    celery5_replaced(len, 7)\n"
        "    assert REPLACED_RESOURCES == {len: 7}\n"
        "def test_it_has_ended():\n"
        "    from celery5.runners.open_resources import REPLACED_RESOURCES\n"
        "    assert REPLACED_RESOURCES == {}\n"
    )
    # No other plugin is loaded, so that what is loaded is of this one.
    options = ("-q", "-p", "no:cacheprovider", "-p", plugin.value)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_loaded.py"],
        env=environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "3 passed" in ended.stdout, ended.stdout
