"""Retry policy: how often, how long, and which numbers make no sense."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5 import Misconfigured, RetryPolicy
from celery5.protocol.job.retry_policy import LONGEST
from celery5.protocol.names import get_class_names

ENVIRON = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
chances = st.floats(0, 1, exclude_max=True)


@given(st.integers(1, 10**6), st.floats(0, LONGEST), st.floats(0, LONGEST), chances, st.booleans())
def test_a_wait_is_never_negative_and_never_above_the_cap(
    attempt: int, backoff: float, cap: float, chance: float, jitter: bool
) -> None:
    policy = RetryPolicy(backoff=backoff, cap=cap, jitter=jitter).checked()
    wait = policy.delay(attempt, lambda: chance)
    assert 0 <= wait <= cap
    assert int(wait * 1000) >= 0  # the settlement takes it in ms


def test_without_jitter_the_wait_doubles_up_to_the_cap() -> None:
    policy = RetryPolicy(backoff=2, cap=15, jitter=False)
    assert [policy.delay(attempt, lambda: 0.1) for attempt in range(1, 6)] == [2, 4, 8, 15, 15]


def test_with_jitter_the_wait_is_spread_over_all_of_it() -> None:
    policy = RetryPolicy(backoff=2, cap=15)
    assert [policy.delay(3, iter([chance]).__next__) for chance in (0.0, 0.5, 0.75)] == [0, 4, 6]


def test_the_default_is_three_retries() -> None:
    assert [RetryPolicy().allows(attempt) for attempt in (1, 2, 3, 4)] == [True, True, True, False]


@pytest.mark.parametrize(
    "said",
    [
        {"max_retries": -1},
        {"max_retries": 1.5},
        {"max_retries": "3"},
        {"backoff": -0.1},
        {"backoff": math.nan},
        {"backoff": math.inf},
        {"backoff": "1"},
        {"cap": -1},
        {"cap": math.inf},
        {"cap": 1e300},
        {"jitter": "yes"},
    ],
    ids=str,
)
def test_a_policy_that_makes_no_sense_is_refused_by_name(said: dict[str, Any]) -> None:
    (name,) = said
    with pytest.raises(Misconfigured, match=f"^{name} is .+: Expected"):
        RetryPolicy(**said).checked()


def test_the_proposals_names_make_waits_that_grow_evenly() -> None:
    def waits(most: int, start: float, step: float, interval: float) -> list[float]:
        policy = RetryPolicy.parse(
            {"max_retries": most, "interval_start": start, "interval_step": step, "interval_max": interval}
        )
        assert not policy.jitter
        return [round(policy.delay(attempt, lambda: 0.3), 3) for attempt in range(1, policy.max_retries + 1)]

    assert waits(3, 0, 0.2, 0.2) == [0, 0.2, 0.2]
    assert waits(10, 0, 5, 120) == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45]
    assert waits(3, 0, 0.2, 1) == [0, 0.2, 0.4]
    assert waits(2, 9, 1, 4) == [4, 4]


def test_a_policy_may_be_a_mapping_and_what_it_leaves_out_has_its_default() -> None:
    assert RetryPolicy.parse({}) == RetryPolicy()
    assert RetryPolicy.parse({"max_retries": 5, "backoff": 2}) == RetryPolicy(max_retries=5, backoff=2)
    assert RetryPolicy.parse({"interval_step": 3}) == RetryPolicy(backoff=0, step=3, cap=0.2, jitter=False)
    assert RetryPolicy.parse({"interval_max": 3, "jitter": True}).jitter
    policy = RetryPolicy(max_retries=1)
    assert RetryPolicy.parse(policy) is policy


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (
            {"max_retry": 3},
            "retry_policy has 'max_retry', which is not known; known: max_retries, backoff, cap",
        ),
        ({"interval_start": -1}, "interval_start is -1: Expected `float` >= 0"),
        ({"interval_max": None}, "interval_max is None: Expected `float`, got `null`"),
        ({"max_retries": None}, "max_retries is None: Expected `int`"),
        (
            {"interval_step": 1, "backoff": 1},
            "retry_policy has 'backoff' and 'interval_step': use one spelling",
        ),
        ({"autoretry_for": ValueError}, "autoretry_for: .+ is no list"),
        (3, "retry_policy is 3: give a RetryPolicy, or a mapping"),
        ("max_retries", "retry_policy is 'max_retries': give"),
    ],
    ids=str,
)
def test_a_mapping_that_is_no_policy_is_refused_in_one_line(said: Any, says: str) -> None:
    with pytest.raises(Misconfigured, match=f"^{says}") as caught:
        RetryPolicy.parse(said)
    assert len(str(caught.value).splitlines()) == 1


class Inner(ConnectionError):
    """An error of the application's own."""


def test_errors_are_given_by_class_or_full_name_and_include_subclasses() -> None:
    policy = RetryPolicy(autoretry_for=[OSError, f"{__name__}.Other"], dont_autoretry_for={TimeoutError})
    assert policy.autoretry_for == ("builtins.OSError", f"{__name__}.Other")
    assert policy.covers(get_class_names(Inner()))
    assert policy.covers([f"{__name__}.Other"])
    assert not policy.covers(get_class_names(ValueError()))
    assert not policy.covers(get_class_names(TimeoutError()))
    assert RetryPolicy(dont_autoretry_for=[OSError]).covers(get_class_names(KeyError()))
    assert RetryPolicy().covers(())
    raw = msgspec.json.encode(policy)
    assert msgspec.json.decode(raw, type=RetryPolicy) == policy
    assert msgspec.json.decode(b'{"autoretry_for": ["anything"]}', type=RetryPolicy).autoretry_for


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (ValueError, "<class 'ValueError'> is no list: give a list of classes of errors"),
        ("builtins.ValueError", "'builtins.ValueError' is no list"),
        (5, "5 is no list"),
        ([5], "5 is no class of errors"),
        ([int], "<class 'int'> is no class of errors"),
        ([ValueError()], r"ValueError\(\) is no class of errors"),
        (["ValueError"], "'ValueError' is no full name: .+ as 'builtins.ValueError'"),
        (["Wrong"], "'Wrong' is no full name: .+ as 'module.Name'"),
    ],
    ids=str,
)
def test_what_is_no_error_is_refused(said: Any, says: str) -> None:
    for name in ("autoretry_for", "dont_autoretry_for"):
        with pytest.raises(Misconfigured, match=f"^{name}: {says}"):
            RetryPolicy(**{name: said}).checked()


def test_a_class_of_a_script_has_the_name_by_which_a_worker_imports_it(tmp_path: Path) -> None:
    script = tmp_path / "shop_script.py"
    script.write_text(
        "from celery5 import RetryPolicy\n"
        "class Wrong(Exception): ...\n"
        "if __name__ == '__main__':\n"
        "    print(*RetryPolicy(autoretry_for=[Wrong]).autoretry_for)\n"
    )
    for command in ([str(script)], ["-m", "shop_script"]):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=True, env=ENVIRON
        )
        assert done.stdout == "shop_script.Wrong\n"
