"""Hold jobs in Redis while a resource is missing: a printing office whose pages wait for paper.

The health check `paper` is the office's own, with its states and its period. It trips the circuit breaker of
`print_page`. By hand, on a Redis of your own:

    TRAY=/tmp/tray celery5 -A celery5.examples.own_health worker start
"""

import os
from pathlib import Path

from celery5 import App, RetryPolicy
from celery5.health import BreakerPolicy

app = App("printing-office")


def sheets() -> int:
    """Return the number of sheets in the tray."""
    file = os.environ.get("TRAY")
    return int(Path(file).read_text()) if file else 500


@app.health_check(period=0.2, states=("empty", "low", "filled"), allowed={"empty": 0})
def paper() -> str:
    """Return the state of the tray, five times a second. `empty` trips the breaker; `low` is reported only."""
    left = sheets()
    return "empty" if left < 1 else "low" if left < 10 else "filled"


@app.task(
    checks=[paper],
    breaker=BreakerPolicy(threshold=None, reset=1.0, growth="linear", longest=60.0),
    retry_policy=RetryPolicy(max_retries=100),
)
def print_page(text: str) -> str:
    """Print a page. A job that finds the tray empty, such as the probe of an open breaker, reports that."""
    if sheets() < 1:
        paper.report("empty", "a page came out blank")
        raise OSError("no paper")
    return f"printed: {text}"
