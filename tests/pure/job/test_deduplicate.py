"""Deduplicate: what a policy must look like, and what its answers mean."""

from typing import Any

import pytest

from celery5 import App, Misconfigured
from celery5.protocol.job.messages import Failure
from celery5.protocol.job.verdict import JobRejected, Raised
from celery5.runners.outcome import get_result_outcome
from celery5.tasks.deduplication import DEFAULT_REASON, get_rejection, prepare_policy
from tests.pure.job.names import steady

APP = App("shop", broker="redis://127.0.0.1:1/0")


def send(to: str, copies: int = 1) -> None:
    """What is deduplicated here."""


async def send_soon(to: str, copies: int = 1) -> None:
    """The same, async."""


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (False, None), (None, None), ("", None), (0, None), ([], None),
        (True, DEFAULT_REASON), (3, DEFAULT_REASON), (object(), DEFAULT_REASON), ("sent on Monday", "sent on Monday"),
    ],
    ids=steady,
)  # fmt: skip
def test_what_is_true_rejects_and_a_text_says_why(answer: Any, why: str | None) -> None:
    def policy(to: str, copies: int = 1) -> Any:
        return answer

    outcome = get_rejection(get_result_outcome(prepare_policy(policy, send, "send")("a")))
    assert outcome == (None if why is None else JobRejected(why))


def test_a_policy_that_failed_is_a_failed_attempt() -> None:
    failed = Raised(Failure(type="OSError", message="no"))
    assert get_rejection(failed) is failed


async def test_a_policy_has_the_colour_of_its_task() -> None:
    async def policy(to: str, copies: int = 1) -> str:
        return f"{to} has {copies}"

    assert await prepare_policy(policy, send_soon, "send")("a", copies=2) == "a has 2"
    with pytest.raises(Misconfigured, match="must be a plain def, as the task is"):
        APP.task(deduplicate=policy)(send)
    with pytest.raises(Misconfigured, match="must be async def, as the task is"):
        APP.task(deduplicate=send)(send_soon)


def test_a_policy_takes_what_its_task_takes_or_anything() -> None:
    def anything(*args: object, **kwargs: object) -> bool:
        return False

    assert APP.task(name="a", deduplicate=anything)(send).deduplicate is not None
    assert APP.task(name="b", deduplicate=send)(send).deduplicate is not None
    assert APP.task(name="c")(send).deduplicate is None

    def fewer(to: str) -> None: ...
    def renamed(whom: str, copies: int = 1) -> None: ...
    def required(to: str, copies: int) -> None: ...
    def positional(*to: object) -> None: ...

    for policy in (fewer, renamed, required, positional):
        with pytest.raises(
            Misconfigured, match=r"task d: its deduplicate policy takes .* must take the task's own"
        ):
            APP.task(name="d", deduplicate=policy)(send)
    with pytest.raises(Misconfigured, match="deduplicate is 'yes': give a function"):
        APP.task(name="d", deduplicate="yes")(send)  # type: ignore[call-overload]
