"""Limits: what a task may declare, what may be imposed, and which of the two holds; no Redis."""

import signal
from typing import Any

import pytest

from celery5 import App, Misconfigured
from celery5.broker.calls.limits import count_starts
from celery5.errors import BadArguments
from celery5.limits import Limit, Range, Rate
from celery5.protocol.job.messages import read_command
from celery5.protocol.limits import (
    AdmissionRule,
    DeclaredLimits,
    LimitOverride,
    escape_word,
    get_waiting_list,
    make_admission_rule,
    unescape_word,
)


def rule(declared: DeclaredLimits | None, **options: Any) -> AdmissionRule | None:
    """The rule of a task `t`."""
    return make_admission_rule(
        "t", declared, **{"computed": None, "override": None, "suspended": False, **options}
    )


def test_a_task_that_says_nothing_has_no_rule() -> None:
    assert rule(None) is None
    assert rule(None, override=LimitOverride()) is None


def test_what_is_imposed_beats_what_a_task_says() -> None:
    gate = DeclaredLimits(limit=Limit(5, per="worker"))
    assert rule(gate) == AdmissionRule("t", max_running=5, per="worker")
    assert rule(gate, override=LimitOverride(limit=2)) == AdmissionRule("t", max_running=2, per="worker")
    assert rule(None, override=LimitOverride(limit=2)) == AdmissionRule("t", max_running=2)
    assert rule(DeclaredLimits(rate=Rate("5/s")), override=LimitOverride(rate="1/m")) == AdmissionRule(
        "t", rate=Rate("1/m")
    )


def test_a_rate_replaces_declared_limits_but_not_imposed_ones() -> None:
    gate = DeclaredLimits(limit=Limit(5), rate=Rate("200/m"))
    assert rule(gate) == AdmissionRule("t", rate=Rate("200/m"))
    assert rule(gate, override=LimitOverride(limit=1)) == AdmissionRule(
        "t", max_running=1, rate=Rate("200/m")
    )


def test_the_limit_0_rejects_and_a_suspended_task_holds_whatever_its_limit() -> None:
    none = rule(DeclaredLimits(limit=Limit(0)))
    held = rule(DeclaredLimits(limit=Limit(0)), suspended=True)
    assert none is not None
    assert held is not None
    assert (none.rejects_all, held.rejects_all) == (True, False)
    assert held.to_script_arguments(9)["want"] == 0
    assert none.to_script_arguments(9)["most"] == -1  # whoever rejects takes all there are


def test_a_computed_limit_stays_within_its_bounds() -> None:
    limit = Range(2, 8, compute=lambda: 1)
    assert [limit.clamp(value) for value in (-3, 2, 5.9, 100, float("inf"))] == [2, 2, 5, 8, 8]
    assert rule(DeclaredLimits(limit=limit), computed=3) == AdmissionRule("t", max_running=3)
    for wrong in (float("nan"), "3", True, None):
        with pytest.raises(ValueError, match="no number"):
            limit.clamp(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "count", "span"),
    [
        ("200/m", 200, 60.0),
        ("5/s", 5, 1.0),
        ("1/h", 1, 3600.0),
        ("10/d", 10, 86400.0),
        ("3/10s", 3, 10.0),
        ("2/1.2s", 2, 1.2),
        ("0.5/m", 1, 120.0),
        ("2.5/s", 1, 0.4),
        ("0.1/2h", 1, 72000.0),
        ("2.0/s", 2, 1.0),
    ],
)
def test_a_rate_is_so_many_in_a_span(words: str, count: int, span: float) -> None:
    rate = Rate(words).validate("t")
    assert (rate.count, rate.span) == (count, span)
    assert 0.05 <= rate.slack <= 1.0


@pytest.mark.parametrize(
    "words",
    [
        "",
        "200",
        "0/m",
        "-1/s",
        "5/x",
        "0.0/s",
        "0.00001/d",
        "5/0s",
        "5 / s",
        "99999999/s",
        "5/1.2345s",
        "5/.5s",
    ],
)
def test_a_rate_that_makes_no_sense_is_refused(words: str) -> None:
    with pytest.raises(Misconfigured, match="task t: rate"):
        Rate(words).validate("t")


@pytest.mark.parametrize("word", ["", "a b", "100%", "%20", " ", "é%"])
def test_words_are_quoted_and_unquoted(word: str) -> None:
    assert " " not in escape_word(word)
    assert unescape_word(escape_word(word)) == word


def test_a_line_is_of_a_task_and_of_the_keys_that_count() -> None:
    assert get_waiting_list(AdmissionRule("a b"), "k", "f") == "a%20b  "
    assert get_waiting_list(AdmissionRule("t", max_running=1, keyed=True), "k", "f") == "t  k"
    assert (
        get_waiting_list(AdmissionRule("t", max_running=1, keyed=True, fair=True), "k", "f g") == "t f%20g k"
    )


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"limit": -1}, "from 0 to"),
    ({"limit": True}, "limit is True"),
    ({"limit": "5"}, "limit is '5'"),
    ({"limit": Limit(1, per="queue")}, "per is 'queue'"),  # type: ignore[arg-type]
    ({"limit": Range(5, 2, compute=lambda: 1)}, "the first bound is the lower one"),
    ({"rate_limit": 5}, "rate_limit is 5"),
    ({"rate_limit": "fast"}, "rate 'fast' is not a rate: write 50/s, 100/m, 3/10s"),
    ({"concurrency_key": "a"}, "give limit, too"),
    ({"limit": 1, "concurrency_key": "c"}, "'c', which is no parameter of it; it has: a, b"),
    ({"fair_key": 3}, "fair_key is 3"),
]


@pytest.mark.parametrize(("said", "told"), WRONG)
def test_a_declaration_that_makes_no_sense_is_refused_at_once(said: dict[str, Any], told: str) -> None:
    def work(a: int, b: int = 2) -> None: ...

    app = App("shop")
    with pytest.raises(Misconfigured, match=told):
        app.task(**said)(work)


def test_keys_are_made_of_the_arguments_and_travel_with_the_job() -> None:
    app = App("shop")

    @app.task(limit=1, concurrency_key="customer", fair_key=lambda customer, order=1: f"{customer}-{order}")
    def charge(customer: str, order: int = 1) -> None: ...

    command = read_command(charge.job("ann", order=7).message)
    assert (command.concurrency_key, command.fair_key) == ("ann", "ann-7")
    assert len(read_command(charge.job("x" * 500).message).concurrency_key) == 32
    with pytest.raises(BadArguments):
        charge.job()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "error", [KeyError("ann"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr
)
def test_a_worker_outlives_whatever_a_function_of_keys_raises(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A worker computes the keys that a message lacks; its handler of SIGINT raises nothing."""
    monkeypatch.setattr(signal, "getsignal", lambda _number: signal.SIG_IGN)
    app = App("shop")

    def get_key(customer: str) -> str:
        raise error

    @app.task(limit=1, concurrency_key=get_key, fair_key=get_key)
    def charge(customer: str) -> None: ...

    assert charge.limits is not None
    assert charge.limits.complete_keys("", "", lambda: (("ann",), {})) == ("", "")
    assert charge.limits.complete_keys("given", "", lambda: (("ann",), {})) == ("given", "")


def test_a_task_with_a_limit_is_sent_to_its_own_queue_only() -> None:
    app = App("shop")

    @app.task(limit=1, queue="bank")
    def charge() -> None: ...

    assert charge.options(countdown=1).send_options.queue == "bank"
    with pytest.raises(
        Misconfigured, match="its own queue: send it nowhere else; name its queue in its declaration"
    ):
        charge.options(queue="other")


def test_only_starts_in_the_period_of_a_rate_that_ends_now_are_counted() -> None:
    rate = Rate("3/10s")
    now = 1_000_000
    starts = [now - 10_200, now - 9_000, now - 1_000]
    left = starts[-1] + rate.window - now
    assert count_starts(rate, starts, left) == 2
    assert count_starts(rate, [], -2) == 0
