"""Own health: a printing office whose pages wait, held in Redis, while there is no paper.

The health check `paper` is the office's own: its states, how often it looks, how much it bears. It trips the circuit
breaker of `print_page`. By hand, on a Redis of your own:

    TRAY=/tmp/tray celery5 -A celery5.examples.own_health worker start
"""

import os
from pathlib import Path

from celery5 import App, RetryPolicy
from celery5.health import BreakerPolicy

app = App("printing-office")


def sheets() -> int:
    """How many sheets are in the tray."""
    file = os.environ.get("TRAY")
    return int(Path(file).read_text()) if file else 500


@app.health_check(period=0.2, states=("empty", "low", "filled"), allowed={"empty": 0})
def paper() -> str:
    """Looked at five times in a second. The first of its states that holds counts; `low` is told and trips nothing."""
    left = sheets()
    return "empty" if left < 1 else "low" if left < 10 else "filled"


@app.task(
    checks=[paper],
    breaker=BreakerPolicy(threshold=None, reset=1.0, growth="linear", longest=60.0),
    retry_policy=RetryPolicy(max_retries=100),
)
def print_page(text: str) -> str:
    """Print a page. One that finds the tray empty, as the probe of an open breaker may, says so."""
    if sheets() < 1:
        paper.report("empty", "a page came out blank")
        raise OSError("no paper")
    return f"printed: {text}"
