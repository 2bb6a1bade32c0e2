"""Read the rates of currencies from a file before the first job needs them."""

import json
import logging
import os
from pathlib import Path

from celery5 import task

_RATES: dict[str, float] = {}


def read_rates() -> dict[str, float]:
    """Read the rates: a boot step. A plain function runs in a thread, so it may block. Other steps get the result."""
    file = os.environ.get("RATES")
    _RATES.update(json.loads(Path(file).read_text()) if file else {"EUR": 1.0, "USD": 0.9})
    return _RATES


async def forget_rates(logger: logging.Logger) -> None:
    """Undo the step, after the last job."""
    logger.info("the bureau is closed")
    _RATES.clear()


async def greet(rates: dict[str, float], logger: logging.Logger) -> None:
    """Log the currencies: an optional step. If it fails the worker continues without it, and can retry it."""
    logger.info("we change %s", ", ".join(sorted(rates)))


@task
async def change(amount: float, currency: str) -> float:
    """Return an amount of a currency in euros."""
    return round(amount * _RATES[currency], 2)


@task
async def note(currencies: int) -> int:
    """Note how many currencies the bureau changes."""
    return currencies
