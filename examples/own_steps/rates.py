"""Rates: what a currency is worth, read from a file before the first job needs it."""

import json
import logging
import os
from pathlib import Path

from celery5 import task

_RATES: dict[str, float] = {}


def read_rates() -> dict[str, float]:
    """The boot step: a plain function, so it runs in a thread, and may block. What it returns is there for others."""
    file = os.environ.get("RATES")
    _RATES.update(json.loads(Path(file).read_text()) if file else {"EUR": 1.0, "USD": 0.9})
    return _RATES


async def forget_rates(logger: logging.Logger) -> None:
    """Undoes it, when no job runs any more."""
    logger.info("the bureau is closed")
    _RATES.clear()


async def greet(rates: dict[str, float], logger: logging.Logger) -> None:
    """An optional step: should it fail, the worker goes on without it and tries it again."""
    logger.info("we change %s", ", ".join(sorted(rates)))


@task
async def change(amount: float, currency: str) -> float:
    """What so much of a currency is in euros."""
    return round(amount * _RATES[currency], 2)


@task
async def note(currencies: int) -> int:
    """Note how many currencies the bureau changes."""
    return currencies
