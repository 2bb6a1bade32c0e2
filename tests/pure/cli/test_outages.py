"""Outages: a broker that cannot be reached is told in one sentence, whether it was tried or its breaker is open."""

import pytest

from celery5.cli.terminal.errors import explain_error
from celery5.errors import BrokerUnavailable, CircuitOpen

WHERE = "broker redis://shop.example:6379/0"
TOLD = f"{WHERE} cannot be reached: Connection refused"
OPEN = f"{WHERE} is not tried again yet (circuit breaker open): "


@pytest.mark.parametrize(
    "error",
    [BrokerUnavailable(TOLD), CircuitOpen(f"{OPEN}{TOLD}"), CircuitOpen(f"{OPEN}Connection refused")],
    ids=["tried", "open", "open after another error"],
)
def test_an_outage_is_one_sentence_whether_or_not_the_circuit_breaker_is_open(error: Exception) -> None:
    assert explain_error(error) == (f"Error: {TOLD}", 1)


def test_a_broker_that_does_not_answer_is_told_as_that_while_its_breaker_is_open() -> None:
    silent = f"{WHERE} gave no answer within 5 s"
    assert explain_error(CircuitOpen(f"{OPEN}{silent}")) == (f"Error: {silent}", 1)
