"""Repeated values: small in memory and endless as JSON. As a script, encodes one of them within limits of its own."""

import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery5.protocol.job.verdict import PermanentFailure
from celery5.runners.outcome import get_result_outcome


@dataclass
class Pair:
    """Two parts."""

    left: Any
    right: Any


def double(pair: Callable[[Any], Any]) -> Any:
    """Return forty pairs, each twice in the next one."""
    value: Any = [0]
    for _ in range(40):
        value = pair(value)
    return value


VALUES: dict[str, Callable[[], Any]] = {
    "lists": lambda: double(lambda value: [value, value]),
    "tuples": lambda: double(lambda value: (value, value)),
    "mappings": lambda: double(lambda value: {"a": value, "b": value}),
    "dataclasses": lambda: double(lambda value: Pair(value, value)),
    "a long text": lambda: ["x" * 10_000_000] * 10_000,
    "a wide list": lambda: [[0] * 10_000] * 10_000,
}


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
    resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
    outcome = get_result_outcome(VALUES[sys.argv[1]]())
    assert isinstance(outcome, PermanentFailure)
    sys.stdout.write(outcome.failure.message)
