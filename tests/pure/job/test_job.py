"""Job: its options and their contradictions, and its id."""

import math
import re
import time
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5 import App, Misconfigured, RetryPolicy
from celery5.protocol.job.job import Options, new_id
from celery5.protocol.job.messages import read_command

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


def test_an_id_is_22_url_safe_characters_and_never_the_same() -> None:
    ids = [new_id() for _ in range(5000)]
    assert len(set(ids)) == 5000
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{22}", job_id) for job_id in ids)


@pytest.mark.parametrize(
    ("options", "at"),
    [
        (Options(), ""),
        (Options(countdown=0), "+0"),
        (Options(countdown=1.5), "+1500"),
        (Options(countdown=timedelta(minutes=1)), "+60000"),
        (Options(eta=NOON), str(int(NOON.timestamp()) * 1000)),
        (Options(eta=NOON.astimezone(timezone(timedelta(hours=5)))), str(int(NOON.timestamp()) * 1000)),
    ],
    ids=str,
)
def test_when_a_job_may_start(options: Options, at: str) -> None:
    assert options.checked().format_start() == at


@pytest.mark.parametrize(
    ("expires", "moment"),
    [(None, None), (30, 1030.0), (timedelta(seconds=1.5), 1001.5), (NOON, NOON.timestamp()), (0, 1000.0)],
    ids=str,
)
def test_when_a_job_expires(expires: Any, moment: float | None) -> None:
    assert Options(expires=expires).checked().get_expiry(1000.0) == moment


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"countdown": 1, "eta": NOON}, "give countdown or eta, not both"),
        ({"eta": NOON.replace(tzinfo=None)}, "eta 2030-01-01 12:00:00 has no time zone: use datetime"),
        (
            {"expires": NOON.replace(tzinfo=None)},
            "expires 2030-01-01 12:00:00 has no time zone: use datetime",
        ),
        ({"eta": 1234.5}, "eta is 1234.5: give an aware datetime"),
        ({"eta": "noon"}, "eta is 'noon': give an aware datetime"),
        ({"countdown": "5"}, "countdown is '5': give seconds or a timedelta"),
        ({"countdown": math.inf}, "countdown is inf: give seconds or a timedelta"),
        ({"countdown": math.nan}, "countdown is nan: give seconds or a timedelta"),
        ({"countdown": 10**400}, "countdown is 1000.*: give seconds or a timedelta"),
        ({"time_limit": -(10**400)}, "time_limit is -1000.*: give seconds or a timedelta"),
        ({"countdown": NOON}, "countdown is datetime.* give seconds or a timedelta"),
        ({"countdown": True}, "countdown is True: give seconds or a timedelta"),
        (
            {"countdown": timedelta.max},
            "countdown is .*: give seconds or a timedelta, at most a hundred years",
        ),
        ({"expires": math.nan}, "expires is nan: give seconds or a timedelta"),
        ({"expires": "tomorrow"}, "expires is 'tomorrow': give seconds"),
        (
            {"queue": ""},
            "queue '': a queue's name is 1 to 200 characters without spaces, commas, braces or #",
        ),
        ({"queue": "a b"}, "queue 'a b': a queue's name"),
        ({"queue": "a,b"}, "queue 'a,b': a queue's name"),
        ({"countdown": -5}, "countdown is -5: give 0 seconds or more"),
        ({"expires": -0.1}, "expires is -0.1: give 0 seconds or more"),
        ({"expires": timedelta(-1)}, "expires is .*: give 0 seconds or more"),
        ({"queue": "a{b}"}, "queue 'a{b}': a queue's name"),
        ({"queue": "a\n"}, "queue 'a+.*: a queue's name"),
        ({"queue": "a" * 201}, "queue 'a+.*: a queue's name"),
        ({"queue": 5}, "queue 5: a queue's name"),
        (
            {"time_limit": 5, "soft_time_limit": 5},
            "time_limit is 5 s and soft_time_limit 5 s: the soft limit comes",
        ),
        (
            {"time_limit": 5, "soft_time_limit": timedelta(minutes=1)},
            "time_limit is 5 s and soft_time_limit 60 s",
        ),
        ({"max_retries": -1}, "max_retries is -1"),
        ({"backoff": -1}, "backoff is -1"),
        ({"cap": math.inf}, "cap is inf"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(said: dict[str, Any], says: str) -> None:
    with pytest.raises(Misconfigured, match=f"^{says}"):
        Options(**said).checked()


spans = st.none() | st.floats(0, 1e9) | st.timedeltas(timedelta(0), timedelta(days=9999))


@given(spans, spans | st.datetimes(timezones=st.just(UTC)))
def test_whatever_is_accepted_can_be_sent(countdown: Any, expires: Any) -> None:
    options = Options(countdown=countdown, expires=expires).checked()
    assert re.fullmatch(r"|\+[0-9]+", options.format_start())
    moment = options.get_expiry(time.time())
    assert moment is None or math.isfinite(moment)


@given(st.datetimes(timezones=st.just(UTC)))
def test_any_aware_eta_can_be_sent(eta: datetime) -> None:
    assert re.fullmatch(r"-?[0-9]+", Options(eta=eta).checked().format_start())


def sends_policy(options: Options) -> bool:
    """Whether jobs with these options take a policy along."""
    terms = options.shared_fields(RetryPolicy(), queue="mail", ignore_result=False, results_ttl=1)
    return "retry" in terms.fields


@pytest.mark.parametrize(
    "said",
    [
        {"max_retries": 7},
        {"backoff": 9.0},
        {"cap": 5.0},
        {"jitter": False},
        {"step": 2.0},
        {"autoretry_for": ("builtins.OSError",)},
        {"dont_autoretry_for": ("builtins.OSError",)},
    ],
    ids=str,
)
@pytest.mark.parametrize("whole", [False, True], ids=["alone", "in a policy"])
def test_retry_options_of_a_call_travel_with_the_job(said: dict[str, Any], whole: bool) -> None:
    app = App("retries")

    @app.task(name="t")
    def task() -> None: ...

    options: dict[str, Any] = {"retry_policy": said} if whole else said
    assert sends_policy(Options(**options))
    message = read_command(task.options(**options).s().job().message)
    assert message.retry == RetryPolicy(**said) != RetryPolicy()
    assert read_command(task.s().job().message).retry is None


def test_what_is_said_about_retries_goes_over_the_fallback() -> None:
    fallback = RetryPolicy(max_retries=9, backoff=2, cap=7, jitter=False)
    assert Options().get_retry_policy(fallback) is fallback
    assert Options(max_retries=0).get_retry_policy(fallback) == RetryPolicy(
        max_retries=0, backoff=2, cap=7, jitter=False
    )
    assert Options(jitter=True, cap=0).get_retry_policy(fallback) == RetryPolicy(
        max_retries=9, backoff=2, cap=0
    )
    assert not sends_policy(Options(queue="a", countdown=1))
    assert sends_policy(Options(max_retries=0))
    assert sends_policy(Options(jitter=False))


def test_retry_policy_replaces_fields_and_later_fields_replace_its_own() -> None:
    even = {"max_retries": 3, "interval_start": 0, "interval_step": 0.2, "interval_max": 1}
    task = Options(max_retries=9, autoretry_for=[OSError]).checked()
    whole = task.merge({"retry_policy": even})
    assert whole.get_retry_policy(RetryPolicy(max_retries=7)) == RetryPolicy.parse(even)
    assert sends_policy(whole)
    again = whole.merge({"max_retries": 5, "queue": "mail"})
    assert again.get_retry_policy(RetryPolicy()) == RetryPolicy.parse({**even, "max_retries": 5})
    assert task.merge({"retry_policy": RetryPolicy(cap=5)}).get_retry_policy(RetryPolicy()) == RetryPolicy(
        cap=5
    )
    assert task.merge({"queue": "mail"}).get_retry_policy(RetryPolicy()) == RetryPolicy(
        max_retries=9, autoretry_for=["builtins.OSError"]
    )
    for wrong in ({"max_retry": 3}, {"interval_max": -1}, 3):
        with pytest.raises(Misconfigured, match=r"^(retry_policy|interval_max) "):
            Options(retry_policy=wrong).checked()  # type: ignore[arg-type]


def test_an_id_can_be_typed_after_a_command() -> None:
    assert not any(new_id().startswith("-") for _ in range(2_000))
