"""In memory: jobs, events and workflows run in the test, with the worker and the scripts of production, no server."""

import asyncio
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trio

from celery5 import App, Event, every, group
from celery5.errors import BrokerReplied, Misconfigured, ResultTimeout, RunWaits, TaskFailed, WorkflowFailed
from celery5.protocol.job.states import JobState
from celery5.tasks import CurrentJob
from celery5.testing import InMemoryWorker, in_memory, recorded
from celery5.testing.memory_server.command_table import COMMANDS
from celery5.workflows import Flow, StepFailure

pytest_plugins = ["celery5.testing.pytest"]
HOUR, DAY = 3600, 86_400


class Bank:
    """An application whose tasks note what they did, in which thread, and when by the virtual clock."""

    def __init__(self, name: str) -> None:
        self.app = app = App(name, results_ttl=90 * DAY)
        self.notes: list[str] = []
        self.threads: set[int] = set()
        self.jobs: InMemoryWorker | None = None
        self.times: list[float] = []

        @app.event
        class Paid(Event):
            order: int
            name: str = "Ada"

        @app.task(bind=True, max_retries=3, backoff=HOUR, jitter=False)
        def charge(job: CurrentJob, order: int, *, fails: int = 0) -> int:
            self.threads.add(threading.get_ident())
            self.times.append(self.jobs.now if self.jobs else 0.0)
            if job.attempt <= fails:
                raise ConnectionError(f"attempt {job.attempt}")
            Paid.delay(order=order)
            return order * 2

        @Paid.subscribe
        @app.task
        async def receipt(order: int, name: str) -> str:
            self.notes.append(f"receipt {order} {name}")
            return name

        @app.task(max_retries=0)
        async def fail(what: str) -> None:
            raise LookupError(what)

        @app.task
        async def note(what: str) -> str:
            self.notes.append(what)
            return what

        @app.task(loop="asyncio")
        async def on_asyncio(what: str) -> str:
            await asyncio.sleep(0)
            self.notes.append(what)
            return what

        @app.task(dynamic=True)
        async def grow(count: int) -> Any:
            return group(*[note.s(f"grown {number}") for number in range(count)])

        self.Paid, self.charge, self.receipt, self.fail, self.note = Paid, charge, receipt, fail, note
        self.on_asyncio, self.grow = on_asyncio, grow


@pytest.fixture
def bank(app_name: str) -> Bank:
    """An application of its own for each test."""
    return Bank(app_name)


@pytest.fixture
def jobs(bank: Bank) -> Iterator[InMemoryWorker]:
    """Its jobs in memory."""
    with in_memory(bank.app) as bank.jobs:
        yield bank.jobs


def test_nothing_runs_before_run_is_called_and_then_all_jobs_do(bank: Bank, jobs: InMemoryWorker) -> None:
    result = bank.charge.delay(7)
    assert jobs.jobs_of(bank.charge)[0].arguments == {"order": 7}
    assert not jobs.ran
    ran = jobs.run()
    assert [job.task for job in ran] == [bank.charge.name, bank.receipt.name]
    assert (result.get(timeout=1), bank.notes) == (14, ["receipt 7 Ada"])
    assert jobs.events_of(bank.Paid) == [bank.Paid(order=7)]
    assert jobs.run() == []


def test_jobs_wait_while_the_worker_is_up_and_run_is_over(bank: Bank, jobs: InMemoryWorker) -> None:
    bank.note.delay("first")
    jobs.run()
    bank.note.delay("second")
    time.sleep(0.05)  # a worker that were not held would have taken it within a millisecond
    assert bank.notes == ["first"]
    jobs.run()
    assert bank.notes == ["first", "second"]


def test_retries_and_countdowns_pass_at_once_and_in_their_order(bank: Bank, jobs: InMemoryWorker) -> None:
    start, began = jobs.now, time.monotonic()
    bank.charge.options(countdown=DAY).delay(7, fails=2)
    jobs.run()
    assert [round(at - start) for at in bank.times] == [DAY, DAY + HOUR, DAY + 2 * HOUR]
    assert jobs.assert_ran(bank.charge, 7, attempts=3).error is None
    assert time.monotonic() - began < 20


def test_a_job_with_an_eta_has_its_countdown(bank: Bank, jobs: InMemoryWorker) -> None:
    bank.charge.options(eta=datetime.now(UTC) + timedelta(hours=1)).delay(7)
    bank.charge.options(countdown=HOUR).delay(7)
    assert [round(job.countdown or 0) for job in jobs.jobs_of(bank.charge)] == [HOUR, HOUR]


def test_run_due_lets_no_time_pass_and_advance_as_much_as_it_says(bank: Bank, jobs: InMemoryWorker) -> None:
    bank.charge.delay(7, fails=1)
    jobs.run_due()
    assert isinstance(jobs.assert_ran(bank.charge, attempts=1).error, ConnectionError)
    jobs.advance(HOUR - 1)
    jobs.assert_ran(bank.charge, attempts=1)
    jobs.advance(1)
    jobs.assert_ran(bank.charge, attempts=2)


def test_functions_run_in_the_thread_of_the_test_with_their_limits(bank: Bank, jobs: InMemoryWorker) -> None:
    bank.charge.delay(7)
    bank.charge.options(time_limit=30).delay(8)
    jobs.run()
    assert bank.threads == {threading.get_ident()}


def test_an_error_of_a_job_reaches_the_test_with_its_traceback(bank: Bank, jobs: InMemoryWorker) -> None:
    bank.fail.delay("first")
    bank.fail.delay("second")
    bank.note.delay("runs all the same")
    with pytest.raises(LookupError, match=r"^first") as caught:
        jobs.run()
    assert caught.traceback[-1].name == "fail"
    assert "second" in caught.value.__notes__[0]
    assert bank.notes == ["runs all the same"]
    jobs.run()  # an error is raised once


def test_errors_stay_with_the_jobs_where_the_test_asks_for_that(bank: Bank, jobs: InMemoryWorker) -> None:
    result = bank.fail.delay("it")
    (ran,) = jobs.run(raise_errors=False)
    assert isinstance(ran.error, LookupError)
    with pytest.raises(TaskFailed):
        result.get(timeout=1)


def test_workflows_run_with_their_sleeps_waits_and_dynamic_steps(bank: Bank, jobs: InMemoryWorker) -> None:
    @bank.app.workflow
    def trip(flow: Flow, customer: str) -> str:
        flow.call(bank.note, customer)
        flow.sleep(7 * DAY)
        flow.call(bank.grow, 2)
        flow.call(bank.on_asyncio, "asyncio")
        answer = flow.wait_for("answer")
        return flow.call(bank.note, answer)

    start = jobs.now
    run = trip.start("Ada")
    with pytest.raises(RunWaits, match=r"trip\[.*\] waits for 'answer', and nothing else is left to do"):
        jobs.run()
    assert jobs.now == start + 7 * DAY
    assert sorted(bank.notes[1:3]) == ["grown 0", "grown 1"]
    run.signal("answer", "yes")
    jobs.run()
    assert run.get(timeout=1) == "yes"
    assert bank.notes[3:] == ["asyncio", "yes"]


def test_a_wait_times_out_and_a_failed_workflow_is_undone(bank: Bank, jobs: InMemoryWorker) -> None:
    @bank.app.task
    async def undo(what: str) -> None:
        bank.notes.append(f"undo {what}")

    @bank.app.workflow
    def booking(flow: Flow) -> None:
        flow.call(bank.note.options(undo=undo), "hotel")
        flow.wait_for("answer", timeout=DAY)

    run = booking.start()
    jobs.run()
    with pytest.raises(WorkflowFailed, match="no answer came in time"):
        run.get(timeout=1)
    assert bank.notes == ["hotel", "undo hotel"]


def test_a_run_that_waits_passes_its_deadline_only_by_advance(bank: Bank, jobs: InMemoryWorker) -> None:
    @bank.app.workflow(deadline=3 * DAY)
    def offer(flow: Flow) -> None:
        flow.wait_for("answer")

    run = offer.start()
    with pytest.raises(RunWaits):
        jobs.run()
    jobs.advance(3 * DAY)
    assert run.status().state == "EXPIRED"
    jobs.run()


def test_a_run_that_a_signal_has_ended_is_not_looked_at_again(bank: Bank, jobs: InMemoryWorker) -> None:
    @bank.app.workflow(deadline=3 * DAY)
    def offer(flow: Flow) -> None:
        flow.wait_for("answer")

    offer.start().signal("answer")
    jobs.run()
    assert bank.app.workflows.list_runs(live_only=True) == []
    jobs.advance(4 * DAY)


def test_schedules_fire_only_where_asked_for_and_time_passes(bank: Bank) -> None:
    @bank.app.task(schedule=every(HOUR))
    async def hourly() -> None:
        bank.notes.append("hour")

    with in_memory(bank.app) as jobs:
        jobs.run()
        jobs.advance(3 * HOUR)
        assert bank.notes == []
    with in_memory(bank.app, schedules=True) as jobs:
        jobs.run()
        jobs.advance(3 * HOUR)
        assert bank.notes == ["hour"] * 3


@pytest.mark.parametrize("schedules", [True, False])
def test_a_schedule_that_is_added_while_all_runs_never_blocks_a_test(bank: Bank, schedules: bool) -> None:
    with in_memory(bank.app, schedules=schedules) as jobs:
        jobs.run()
        bank.app.schedule.add(bank.note.s("tick"), every(60), name="ticks")
        jobs.run()
        jobs.advance(130)
        # It fires at whole minutes, two or three of which are in 130 seconds.
        assert bank.notes in ([["tick"] * 2, ["tick"] * 3] if schedules else [[]])


def test_a_schedule_may_name_a_queue_of_its_own(bank: Bank) -> None:
    bank.app.schedule(bank.note.options(queue="odd").s("tick"), every(60), name="ticks")
    with in_memory(bank.app, schedules=True) as jobs:
        jobs.advance(130)
        ran = [(job.queue, job.task) for job in jobs.ran]
        assert ran in [[("odd", bank.note.name)] * count for count in (2, 3)]


def test_an_assertion_says_how_a_schedule_fires(bank: Bank, jobs: InMemoryWorker) -> None:
    @bank.app.task(schedule="0 3 * * *")
    def nightly() -> None: ...

    jobs.advance(DAY)
    with pytest.raises(AssertionError, match=r"with in_memory\(app, schedules=True\) only"):
        jobs.assert_ran(nightly)


def test_a_queue_that_only_a_call_names_is_read(bank: Bank, jobs: InMemoryWorker) -> None:
    @bank.app.task
    async def forward(what: str) -> None:
        await bank.note.options(queue="third").adelay(what)

    bank.note.options(queue="first").delay("first")
    jobs.run()
    sent = bank.note.options(queue="second").delay("second")
    forward.delay("third")
    jobs.run()
    assert sorted(bank.notes) == ["first", "second", "third"]
    assert sent.get(timeout=0) == "second"
    assert [job.queue for job in jobs.ran_of(bank.note)] == ["first", *sorted(("second", "third"))]


def test_rates_go_by_the_time_of_the_test(bank: Bank, jobs: InMemoryWorker) -> None:
    @bank.app.task(rate_limit="2/m")
    def rare(number: int) -> None:
        bank.times.append(jobs.now - start)

    start, began = jobs.now, time.monotonic()
    for number in range(5):
        rare.delay(number)
    jobs.run_due()
    assert bank.times == [0, 0]
    jobs.advance(10)
    assert len(bank.times) == 2
    jobs.run()
    real = time.monotonic() - began
    assert real < 50, "the rate passed by the clock of the test"
    # A start counts a little longer than its minute: its job may begin that much later. Real time makes it older, too.
    assert [60 - real <= passed <= 63 for passed in bank.times[2:4]] == [True, True]
    assert 120 - real <= bank.times[4] <= 126


def test_the_rate_of_a_kind_and_one_set_by_hand_go_by_the_time_of_the_test(
    bank: Bank, jobs: InMemoryWorker
) -> None:
    bank.app.limits.set(bank.note.name, "1/h")
    bank.app.limits.set_kind_rate("thread", "1/h")
    start, began = jobs.now, time.monotonic()
    for number in range(2):
        bank.note.delay(f"{number}")
        bank.charge.delay(number)
    jobs.run()
    assert len(jobs.ran_of(bank.note)) == len(jobs.ran_of(bank.charge)) == 2
    real = time.monotonic() - began
    assert HOUR - real <= jobs.now - start < HOUR + 60


def test_jobs_of_a_suspended_task_stay_until_it_is_resumed(bank: Bank, jobs: InMemoryWorker) -> None:
    bank.app.limits.suspend(bank.note.name)
    bank.note.delay("held")
    jobs.run()
    assert bank.notes == []
    bank.app.limits.resume(bank.note.name)
    jobs.run()
    assert bank.notes == ["held"]


def resume_and_wait_until_taken(bank: Bank, jobs: InMemoryWorker) -> None:
    """Have the worker take two jobs of a suspended task, between two calls of `run`."""
    bank.app.limits.suspend(bank.note.name)
    results = [bank.note.delay("held"), bank.on_asyncio.delay("no limit"), bank.note.delay("held too")]
    jobs.run()
    bank.notes.clear()
    jobs.ran.clear()
    bank.app.limits.resume(bank.note.name)
    deadline = time.monotonic() + 30
    while [results[n].status() for n in (0, 2)] != [JobState.EXECUTING] * 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [results[n].status() for n in (0, 2)] == [JobState.EXECUTING] * 2


def test_jobs_that_a_limit_lets_through_between_two_runs_begin_in_the_next(
    bank: Bank, jobs: InMemoryWorker
) -> None:
    resume_and_wait_until_taken(bank, jobs)
    assert (bank.notes, jobs.ran) == ([], [])
    assert len(jobs.run()) == 2
    assert sorted(bank.notes) == ["held", "held too"]


def test_jobs_that_were_let_through_do_not_begin_when_the_test_ends(bank: Bank) -> None:
    with in_memory(bank.app) as bank.jobs:
        resume_and_wait_until_taken(bank, bank.jobs)
    assert bank.notes == []


def test_assertions_say_what_was_sent_and_what_ran_instead(bank: Bank, jobs: InMemoryWorker) -> None:
    name = bank.charge.name.removesuffix(".charge")

    def fails(assertion: Any, *args: Any, **kwargs: Any) -> str:
        with pytest.raises(AssertionError) as caught:
            assertion(*args, **kwargs)
        return str(caught.value).replace(f"{name}.", "")

    assert fails(jobs.assert_sent, bank.charge) == "charge() was not sent; nothing was sent"
    bank.note.delay("hello")
    bank.charge.delay(7, fails=1)
    bank.Paid.delay(order=3)
    assert fails(jobs.assert_sent, bank.charge, 8) == (
        "charge(order=8) was not sent; this was sent:\n"
        "  charge(order=7, fails=1): order differs\n"
        "  note(what='hello')"
    )
    assert fails(jobs.assert_sent, bank.Paid, order=4).splitlines() == [
        "Paid(order=4) was not sent; this was sent:",
        "  Paid(order=3, name='Ada'): order differs",
    ]
    assert fails(jobs.assert_not_sent, bank.charge, 7) == "charge(order=7) was sent, once"
    assert fails(jobs.assert_ran, bank.charge, 7) == (
        "charge(order=7) did not run; nothing ran; it runs when the test calls run()"
    )
    jobs.run()
    assert fails(jobs.assert_ran, bank.charge, 7, attempts=3) == (
        "charge(order=7) did not run with attempts=3, but with 2"
    )
    assert (
        fails(jobs.assert_ran, bank.charge, 9).splitlines()[1] == "  charge(order=7, fails=1): order differs"
    )
    assert fails(jobs.assert_not_ran, bank.charge) == "charge() ran, once"
    assert jobs.assert_sent(bank.charge, 7).queue == "default"
    assert jobs.assert_sent(bank.Paid, order=3) == bank.Paid(order=3)
    jobs.assert_not_sent(bank.charge, 8)
    jobs.assert_not_ran(bank.charge, 8)
    with pytest.raises(TypeError, match="ordr"):
        jobs.assert_sent(bank.charge, ordr=1)


def test_recorded_has_the_same_assertions_as_in_memory(bank: Bank) -> None:
    with recorded(bank.app) as sent:
        bank.charge.delay(7)
        bank.Paid.delay(order=8)
    assert sent.assert_sent(bank.charge, 7).arguments == {"order": 7}
    sent.assert_sent(bank.Paid, order=8)
    with pytest.raises(AssertionError, match="order differs"):
        sent.assert_sent(bank.charge, 8)


async def test_it_works_on_trio(bank: Bank, jobs: InMemoryWorker) -> None:
    result = await bank.charge.adelay(7, fails=1)
    await jobs.arun_due()
    await jobs.aadvance(DAY)
    await jobs.arun()
    assert await result.aget(timeout=1) == 14
    assert bank.threads != {threading.get_ident()}


def test_it_works_on_asyncio(bank: Bank, jobs: InMemoryWorker) -> None:
    async def check() -> int:
        result = await bank.charge.adelay(7, fails=1)
        await jobs.arun()
        return await result.aget(timeout=1)

    assert asyncio.run(check()) == 14


def test_a_job_that_needs_another_one_does_not_hang(bank: Bank, jobs: InMemoryWorker) -> None:
    @bank.app.task
    async def parent() -> str:
        child = await bank.note.adelay("child")
        return await child.aget(timeout=5)

    result = parent.delay()
    jobs.run()
    assert result.get(timeout=1) == "child"


def test_a_job_must_not_run_others(bank: Bank, jobs: InMemoryWorker) -> None:
    @bank.app.task(max_retries=0)
    def nested() -> None:
        jobs.run()

    nested.delay()
    with pytest.raises(Misconfigured, match="at work already"):
        jobs.run()


def test_it_leaves_no_thread_and_no_broker_behind(bank: Bank) -> None:
    before, broker = threading.active_count(), bank.app.settings.broker
    for _ in range(2):
        with in_memory(bank.app) as jobs:
            folder = bank.app.connections
            bank.charge.delay(7)
            jobs.run()
        assert bank.app.connections is not folder
    assert bank.app.settings.broker == broker
    names = {thread.name for thread in threading.enumerate() if not thread.name.startswith("Trio")}
    assert not any("celery5" in name for name in names), names
    assert (
        threading.active_count() <= before + 4
    )  # Trio keeps threads for ten seconds, for the next who needs one
    assert bank.app.middleware.sends is False


def test_the_fixture_keeps_jobs_in_memory(bank: Bank, celery5_in_memory: Any) -> None:
    jobs = celery5_in_memory(bank.app)
    bank.note.delay("x")
    jobs.run()
    jobs.assert_ran(bank.note, "x")


def test_without_its_package_it_says_what_to_install(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(_name: str) -> None: ...

    monkeypatch.setattr("celery5.testing.in_memory_worker.find_spec", find_nothing)
    with (
        pytest.raises(Misconfigured, match=r"pip install .*'lupa>=.*celery5\[testing\]"),
        in_memory(bank.app),
    ):
        pass


def test_many_jobs_of_both_colours_run_in_memory(bank: Bank, jobs: InMemoryWorker) -> None:
    for number in range(200):
        bank.charge.delay(number)
    jobs.run()
    assert len(jobs.ran_of(bank.charge)) == len(jobs.ran_of(bank.receipt)) == 200


def test_a_result_that_is_wanted_before_the_jobs_run_says_what_to_call(
    bank: Bank, jobs: InMemoryWorker
) -> None:
    result = bank.note.delay("late")
    with pytest.raises(
        ResultTimeout, match=r"no job has run yet: call run\(\) of what in_memory\(\) returned"
    ):
        result.get(timeout=0.05)
    jobs.run()
    assert result.get() == "late"


def test_job_of_a_task_that_nobody_declares_is_dead_at_once(bank: Bank, jobs: InMemoryWorker) -> None:
    newer = App(bank.app.name)

    @newer.task(name="of.tomorrow")
    def later(n: int) -> None: ...

    bank.app.send_jobs([later.job(1)])
    began = time.monotonic()
    with pytest.raises(TaskFailed, match="unknown-task"):
        jobs.run()
    assert time.monotonic() - began < bank.app.settings.unknown_task_grace / 10


def test_a_dead_job_calls_its_failure_task(bank: Bank, jobs: InMemoryWorker) -> None:
    @bank.app.task
    def tell(failures: list[StepFailure]) -> None:
        bank.notes.extend(f"{failure.task} {failure.reason}" for failure in failures)

    bank.fail.options(on_failure=tell.s()).delay("x")
    jobs.run(raise_errors=False)
    assert bank.notes == [f"{bank.fail.name} not-retried"]


def test_a_worker_that_ends_ends_the_test_with_its_error(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        with in_memory(bank.app) as jobs:
            bank.note.delay("x")
            monkeypatch.delitem(COMMANDS, b"XDEL")
            with pytest.raises(RuntimeError, match=r"the worker of this test has ended: .*XDEL"):
                jobs.run()

    with pytest.raises(BrokerReplied, match="XDEL"):
        run()


def test_tests_of_trio_itself_are_untouched(bank: Bank, jobs: InMemoryWorker) -> None:
    bank.note.delay("x")

    async def check() -> None:
        await jobs.arun()

    trio.run(check)
    assert bank.notes == ["x"]
