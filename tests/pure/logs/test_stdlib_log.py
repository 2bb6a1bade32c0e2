"""Stdlib log: records of the standard library's logging become lines of the worker's log, and never harm who logs."""

import io
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

from celery5.errors import SoftTimeLimitExceeded
from celery5.logs.log import Level, LogWriter
from celery5.logs.stdlib_log import captured_logging
from celery5.runners.context import CURRENT_JOB, CurrentJob

LOGGER = logging.getLogger("shop.tasks")


@contextmanager
def bare(*handlers: logging.Handler, level: int = logging.WARNING) -> Generator[logging.Logger, None, None]:
    """The root logger as a program has it that never heard of logging, or with these handlers; pytest has its own
    there."""
    root = logging.getLogger()
    before, its_level = root.handlers[:], root.level
    root.handlers[:] = handlers
    root.setLevel(level)
    try:
        yield root
        assert (root.handlers, root.level) == ([*handlers], level), "as it was found"
    finally:
        root.handlers[:] = before
        root.setLevel(its_level)


@contextmanager
def lines(
    level: Level = "info", *handlers: logging.Handler, root: int = logging.WARNING
) -> Generator[list[dict[str, Any]], None, None]:
    """What is logged in the block, once the block is over."""
    stream, said = io.StringIO(), list[dict[str, Any]]()
    with (
        bare(*handlers, level=root),
        LogWriter(stream, level=level) as journal,
        captured_logging(journal, level),
    ):
        yield said
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    said += [line for line in found if line.get("message_type") == "celery5:log"]


def test_a_record_has_its_level_its_logger_its_text_and_its_job() -> None:
    with lines() as log_lines:
        LOGGER.debug("nobody asked")
        LOGGER.info("order %d", 7, extra={"customer": "ada", "basket": {1: 2}})
        token = CURRENT_JOB.set(CurrentJob("j1", "shop.charge", "default", 1, "w1"))
        LOGGER.critical("no bank")
        CURRENT_JOB.reset(token)
    first, second = log_lines
    assert abs(first.pop("timestamp") - time.time()) < 60
    assert first == {
        "worker": "",
        "message_type": "celery5:log",
        "level": "info",
        "logger": "shop.tasks",
        "message": "order 7",
        "customer": "ada",
        "basket": "{1: 2}",
    }
    assert (second["level"], second["job"], second["task"], second["worker"]) == (
        *("error", "j1", "shop.charge", "w1"),
    )


@pytest.mark.parametrize(("level", "count"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_the_level_of_the_log_is_that_of_the_loggers(level: Level, count: int) -> None:
    with lines(level) as log_lines:
        for log_function in (LOGGER.debug, LOGGER.info, LOGGER.warning, LOGGER.error):
            log_function("x")
    assert len(log_lines) == count


def test_a_traceback_comes_along() -> None:
    with lines() as log_lines:
        try:
            raise LookupError("no order 7")
        except LookupError:
            LOGGER.exception("refund")
        LOGGER.info("here", stack_info=True)
    assert log_lines[0]["traceback"].splitlines()[0] == "Traceback (most recent call last):"
    assert log_lines[0]["traceback"].splitlines()[-1] == "LookupError: no order 7"
    assert log_lines[1]["traceback"].startswith("Stack (most recent call last):")


def test_an_application_with_handlers_of_its_own_is_left_alone() -> None:
    stream = io.StringIO()
    with lines("info", logging.StreamHandler(stream)) as log_lines:
        LOGGER.info("x")
        LOGGER.warning("y")
    assert (log_lines, stream.getvalue()) == ([], "y\n")


def test_a_level_of_its_own_stays() -> None:
    with lines(root=logging.ERROR) as log_lines:
        LOGGER.warning("x")
        LOGGER.error("y")
    assert [line["message"] for line in log_lines] == ["y"]


class Chatty:
    """A value that logs when it is shown."""

    def __str__(self) -> str:
        LOGGER.warning("%s", self)
        return "chatty"

    __repr__ = __str__


class Broken:
    """A value that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


def test_it_never_raises_and_never_goes_round_in_circles() -> None:
    with lines() as log_lines:
        LOGGER.info("%s", Chatty())
        LOGGER.info("%d orders", "many")
        LOGGER.info("%s", Broken())
        LOGGER.info("x", extra={"of": Broken(), "number": 10**30, "half": "\ud800"})
        LOGGER.info(Broken())
        LOGGER.info("after")
    assert [line["message"] for line in log_lines[:3]] == [
        "chatty",
        "%d orders (its values do not fit: TypeError)",
        "%s (its values do not fit: RuntimeError)",
    ]
    assert log_lines[-2]["message"] == "<Broken> (its values do not fit: RuntimeError)"
    assert log_lines[-1]["message"] == "after"


def test_a_time_limit_that_hits_it_goes_through_and_leaves_nothing_locked() -> None:
    class Slow:
        def __str__(self) -> str:
            raise SoftTimeLimitExceeded("1 s")

    with lines() as log_lines:
        with pytest.raises(SoftTimeLimitExceeded):
            LOGGER.info("%s", Slow())
        LOGGER.info("after")
    assert [line["message"] for line in log_lines] == ["after"]


def test_threads_may_log_at_once() -> None:
    def log() -> None:
        for number in range(200):
            LOGGER.info("%d", number)

    with lines() as log_lines:
        threads = [threading.Thread(target=log) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert len(log_lines) == 1600


def test_a_forked_process_says_on_stderr_what_it_would_without_a_worker(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with lines() as log_lines:
        child = os.fork()
        if not child:
            LOGGER.info("nobody hears")
            LOGGER.warning("from the child")
            sys.stderr.flush()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert log_lines == []
    assert capfd.readouterr().err == "from the child\n"


def test_people_see_who_said_what() -> None:
    stream = io.StringIO()
    with bare(), LogWriter(stream, line_format="console") as journal, captured_logging(journal, "info"):
        token = CURRENT_JOB.set(CurrentJob("j1", "shop.charge", "default", 1, "w1"))
        LOGGER.warning("no bank\ntoday")
        CURRENT_JOB.reset(token)
    line = [text for text in stream.getvalue().splitlines(True) if "shop.tasks" in text]
    assert line[0].endswith(" warning w1 shop.tasks       no bank\n")
    assert stream.getvalue().endswith("\n    today  job=j1  task=shop.charge\n")
