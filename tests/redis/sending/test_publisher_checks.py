"""Publisher checks in a process that publishes by itself: while one is bad, jobs wait in the backlog."""

import os
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

from celery5 import App
from celery5.errors import CircuitOpen
from celery5.logs.log import NullLog
from celery5.sending.publishing_checks import ProcessChecks
from tests.redis.commands.staff import wait_until
from tests.redis.sending.test_backlog import numbers
from tests.redis.sending.test_producers import Api, in_every_colour, tell


class Bank:
    """What the publisher check looks at."""

    def __init__(self) -> None:
        self.is_open = True
        self.checks = 0
        self.changed = threading.Event()
        self.is_busy = False

    def check(self) -> bool:
        """Return whether it is open, when it is not busy any more."""
        self.checks += 1
        wait_until(lambda: not self.is_busy)
        return self.is_open

    def wait_for_checks(self, count: int) -> None:
        """Wait for so many further checks."""
        target = self.checks + count
        wait_until(lambda: self.checks >= target)


@pytest.fixture
def bank() -> Bank:
    return Bank()


@pytest.fixture
def shop(url: str, app_name: str, bank: Bank) -> Iterator[App]:
    """An application that publishes while the bank is open."""
    app = App(app_name, broker=url, backlog=5)

    @app.task(name="number")
    async def number(n: int) -> int:
        return n

    app.publisher_check(name="bank", period=0.05, allowed={"unhealthy": 0})(bank.check)
    yield app
    app.close()


@in_every_colour
def test_bad_check_holds_jobs_in_the_backlog_in_order(shop: App, bank: Bank, colour: str) -> None:
    task: Any = shop.tasks["number"]

    async def send(api: Api) -> None:
        await api.delay(task, 0)
        assert shop.backlog.size == 0
        bank.is_open = False
        bank.wait_for_checks(2)
        for number in (1, 2, 3):
            await api.delay(task, number)
        assert (shop.backlog.size, shop.backlog.draining) == (3, False)
        assert shop.backlog.why.startswith("nothing is published now: health check bank is unhealthy")
        assert numbers(shop) == [0]
        bank.is_open = True

    tell(colour, send)
    assert shop.backlog.flush(30)
    assert numbers(shop) == [0, 1, 2, 3]


def test_without_a_backlog_the_sender_is_told_which_check_is_bad(url: str, app_name: str, bank: Bank) -> None:
    app = App(app_name, broker=url, backlog=0)
    number: Any = app.task(name="number")(_return_number)
    app.publisher_check(name="bank", period=0.05, allowed={"unhealthy": 0})(bank.check)
    number.delay(1)
    bank.is_open = False
    bank.wait_for_checks(2)
    with pytest.raises(
        CircuitOpen, match="nothing is published now: health check bank is unhealthy"
    ) as refused:
        number.delay(2)
    assert not refused.value.maybe_done
    number.options(key="direct").delay(3)
    bank.is_open = True

    def is_sent() -> bool:
        try:
            number.delay(4)
        except CircuitOpen:
            return False
        return True

    wait_until(is_sent)
    assert numbers(app) == [1, 3, 4]
    app.close()
    wait_until(lambda: "celery5-publisher-checks" not in [thread.name for thread in threading.enumerate()])


def _return_number(n: int) -> int:
    return n


def test_a_forked_child_runs_checks_of_its_own(shop: App, bank: Bank) -> None:
    task: Any = shop.tasks["number"]
    task.delay(1)
    bank.is_busy = True
    bank.wait_for_checks(1)
    child = os.fork()  # while a check runs, in a thread that the child does not have
    if child == 0:
        try:
            bank.is_busy = False
            task.delay(2)  # begins the child's own checks
            bank.is_open = False
            bank.wait_for_checks(2)
            try:
                shop.dispatch([task.job(3)])
            finally:
                os._exit(0 if shop.backlog.size == 1 else 1)
        except BaseException:
            traceback.print_exc()
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    bank.is_busy = False
    assert bank.is_open
    task.delay(4)
    assert numbers(shop) == [1, 2, 4]


def test_an_application_without_checks_has_no_thread_for_them(url: str, app_name: str) -> None:
    app = App(app_name, broker=url)
    number: Any = app.task(name="number")(_return_number)
    number.delay(1)
    assert "celery5-publisher-checks" not in [thread.name for thread in threading.enumerate()]
    app.close()


def test_checks_that_are_stopped_at_once_do_not_run(shop: App) -> None:
    checks = ProcessChecks(checks=[], keys=shop.keys, log=NullLog())
    checks.stop()
    wait_until(lambda: "celery5-publisher-checks" not in [thread.name for thread in threading.enumerate()])
    assert checks.why == ""
