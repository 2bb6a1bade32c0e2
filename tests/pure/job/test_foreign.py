"""Foreign jobs: when they are kept for other code, and by what code with another signature is told apart."""

import inspect
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from types import GenericAlias
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.config.settings import Settings
from celery5.protocol.job.arguments import Parameters
from celery5.protocol.job.foreign import (
    MAX_SIGNATURES,
    RECHECK_INTERVAL,
    add_signature,
    format_foreign_list,
    make_code_version,
    plan_hand_over,
)
from celery5.protocol.job.messages import (
    Command,
    Failure,
    Refusal,
    encode,
    make_next_attempt,
    make_replay,
    read_command,
    set_refusal,
)
from celery5.protocol.limits import unescape_word


def test_by_default_a_job_outlasts_a_rolling_restart_before_it_is_given_up() -> None:
    grace = Settings().unknown_task_grace
    first = 1e9
    noted = Refusal(since=first)
    during, after = first + 240, first + 301  # a canary of two minutes, and four restarts of up to 30 s each
    assert plan_hand_over(noted, is_known=False, now=during, grace=grace) is not None
    assert plan_hand_over(noted, is_known=False, now=after, grace=grace) is None


def test_a_job_that_a_live_worker_knows_waits_for_it_without_end() -> None:
    plan = plan_hand_over(Refusal(since=1.0), is_known=True, now=1e6, grace=0.0)
    assert plan is not None
    assert (plan.refusal.since, plan.delay) == (0.0, RECHECK_INTERVAL)


@given(
    since=st.floats(allow_nan=False),
    now=st.floats(1e9, 2e9),
    grace=st.floats(0, 86_400),
)
def test_a_job_that_nobody_knows_waits_no_longer_than_the_grace_period(
    since: float, now: float, grace: float
) -> None:
    """Whatever a producer has written into the message."""
    refusal, end = Refusal(since=since), now + grace
    for _ in range(3):
        plan = plan_hand_over(refusal, is_known=False, now=now, grace=grace)
        if plan is None:
            return
        assert plan.delay > 0
        assert now + plan.delay <= end + 1e-3
        refusal, now = plan.refusal, now + plan.delay
    assert plan_hand_over(refusal, is_known=False, now=now + 1e-3, grace=grace) is None


def test_a_job_that_many_signatures_could_not_read_is_not_handed_on_for_ever() -> None:
    refusal: Refusal | None = None
    for number in range(MAX_SIGNATURES + 3):
        refusal = add_signature(refusal, f"s{number}")
    assert refusal is not None
    assert len(refusal.by) == MAX_SIGNATURES
    assert plan_hand_over(refusal, is_known=True, now=5.0, grace=0.0) is None


def test_a_new_attempt_and_a_replay_know_nothing_of_refusals() -> None:
    message = set_refusal(encode(Command(v=1, id="a", task="t")), Refusal(by=("x",), since=3.0))
    assert read_command(message).refused == Refusal(by=("x",), since=3.0)
    assert read_command(make_next_attempt(message, Failure("E", "e"))).refused is None
    assert read_command(make_replay(message)).refused is None


@given(st.text(min_size=1), st.lists(st.text(min_size=1), max_size=3))
def test_the_list_of_a_job_is_two_words_whatever_its_task_is_named(task: str, by: list[str]) -> None:
    name, signatures = format_foreign_list(task, Refusal(by=tuple(by))).split(" ")
    assert unescape_word(name) == task
    assert signatures


class Colour(Enum):
    RED = "red"


class OtherColour(Enum):
    RED = "rouge"


OtherColour.__qualname__ = Colour.__qualname__


def make_class(**fields: Any) -> Any:
    """Return a struct of always the same name."""
    return msgspec.defstruct("Order", list(fields.items()), module=__name__)


def with_check(text: str) -> Any:
    """Return a dataclass that validates."""
    names: dict[str, Any] = {"dataclass": dataclass, "__name__": __name__}
    exec(
        f"@dataclass\nclass Order:\n    n: int\n    def __post_init__(self):\n        assert self.n {text}",
        names,
    )
    return names["Order"]


def digest(*annotations: Any, default: Any = inspect.Parameter.empty, name: str = "n") -> str:
    """Return the digest of a function with these parameters; `default` is that of the last one."""
    parameters = [
        inspect.Parameter(f"{name}{number}", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)
        for number, annotation in enumerate(annotations)
    ]
    if default is not inspect.Parameter.empty:
        parameters[-1] = parameters[-1].replace(default=default)

    def function() -> None: ...

    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return Parameters("t", function).make_digest()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((int,), (str,)),
        ((int,), (int, int)),
        ((list[int],), (list[str],)),
        ((int,), (int | None,)),
        ((int,), (Annotated[int, msgspec.Meta(ge=1)],)),
        ((Annotated[int, msgspec.Meta(ge=2)],), (Annotated[int, msgspec.Meta(ge=1)],)),
        ((Colour,), (OtherColour,)),
        ((make_class(n=int),), (make_class(n=int, size=int),)),
        ((make_class(n=int),), (make_class(n=str),)),
        ((GenericAlias(list, make_class(n=int)),), (GenericAlias(list, make_class(m=int)),)),
        ((make_class(n=make_class(n=int)),), (make_class(n=make_class(n=str)),)),
        ((with_check("> 0"),), (with_check("> 1"),)),
        ((with_check("in {1, 2}"),), (with_check("in {1, 3}"),)),
    ],
)
def test_what_takes_other_arguments_has_another_digest(old: tuple[Any, ...], new: tuple[Any, ...]) -> None:
    assert digest(*old) != digest(*new)
    assert digest(*old) == digest(*old)


def test_a_default_and_a_name_count_but_not_the_value_of_a_default() -> None:
    assert digest(int) != digest(int, default=1)
    assert digest(int) != digest(int, name="m")
    assert digest(int, default=1) == digest(int, default=2)


def test_the_digest_is_the_same_in_every_process() -> None:
    script = (
        "from tests.pure.job.test_foreign import *; import sys; "
        "sys.stdout.write(digest(with_check(\"in {'a', 'b', 'c'}\"), Colour, make_class(n=int), dict[str, object]))"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1
    assert len(runs.pop()) == 12


def test_code_with_the_same_tasks_has_the_same_version() -> None:
    assert make_code_version({"a": "1", "b": "2"}) == make_code_version({"b": "2", "a": "1"})
    assert make_code_version({"a": "1"}).version != make_code_version({"a": "2"}).version
    assert make_code_version({}).version
