"""Mistakes: what is said to celery5 wrongly is refused in one line that says what to say instead.

Floor: tests. Reads: nothing. Writes: nothing; nothing is sent, so no broker is needed.
"""

from datetime import UTC, datetime
from typing import Any

import pytest

from celery5 import App, Misconfigured

app = App("mistakes", broker="redis://127.0.0.1:1/0")


@app.task
def double(a: int) -> int:
    return 2 * a


@pytest.mark.parametrize(
    ("option", "value"),
    [("id", "x"), ("key", "k"), ("countdown", 5), ("eta", datetime(2030, 1, 1, tzinfo=UTC))],
)
def test_what_is_for_one_call_is_refused_in_a_declaration(option: str, value: Any) -> None:
    with pytest.raises(Misconfigured, match=rf"^{option} is for one call: task.options\({option}=...\)$"):
        app.task(name="other", **{option: value})(lambda: None)
    assert "other" not in app.tasks
    assert double.options(**{option: value}).job(1).task == double.name


def test_an_option_that_is_not_known_is_answered_with_all_that_are() -> None:
    with pytest.raises(Misconfigured) as caught:
        app.task(colour=1)  # type: ignore[call-overload]
    told = str(caught.value)
    assert told.startswith("task option 'colour' is not known; known: ")
    known = told.partition("known: ")[2].split(", ")
    assert {
        "name",
        "loop",
        "bind",
        "deduplicate",
        "retry_backoff",
        "abandon_on_cancel",
        "queue",
        "step",
    } < set(known)
    assert not {"id", "key", "countdown", "eta"} & set(known)
    with pytest.raises(
        Misconfigured, match=r"'colour' is not known; known: queue, countdown, eta, .*, id, key"
    ):
        double.options(colour=1)


@pytest.mark.parametrize(
    ("wrong", "right"), [("nmae", "name"), ("dedupe", "deduplicate"), ("max_retry", "max_retries")]
)
def test_an_option_that_is_misspelt_is_answered_with_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(Misconfigured, match=f"'{wrong}' is not known; did you mean '{right}'[?] known: "):
        app.task(**{wrong: 1})  # type: ignore[call-overload]
