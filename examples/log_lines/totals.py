"""Read what the processors have counted, and compare it with a plain count."""

import time
from collections.abc import Callable

import msgspec

from celery5 import App
from celery5.errors import Misconfigured
from celery5.examples.log_lines.folder import ErrorAlert, LogTotals, MinuteCount

POLL_INTERVAL = 0.2
"""Seconds between two looks at the totals."""


def read_totals(app: App) -> LogTotals:
    """Return the last count of each host and minute, and the alerts. Raises BrokerUnavailable."""
    totals = LogTotals()
    for stored in _read(app, "counts"):
        count = msgspec.convert(stored, MinuteCount)
        totals.lines[count.host, count.minute] = count.lines
        totals.errors[count.host, count.minute] = count.errors
    for stored in _read(app, "alerts"):
        alert = msgspec.convert(stored, ErrorAlert)
        totals.alerts[alert.host, alert.minute] += 1
    return totals


def _read(app: App, stream: str) -> list[object]:
    try:
        return [stored.record for stored in app.streams.read(stream, "earliest")]
    except Misconfigured:  # nothing was sent to it yet
        return []


def wait_for_totals(
    app: App, expected: LogTotals, *, within: float, is_over: Callable[[], bool] = lambda: False
) -> list[str]:
    """Wait until the processors have counted what is expected; return in words what differs when the time is over.

    Args:
        app: The application.
        expected: What a plain count has found.
        within: Seconds to wait. It begins again whenever the totals have changed.
        is_over: Returns whether to give up.
    """
    end, seen = time.monotonic() + within, -1
    while True:
        totals = read_totals(app)
        differences = totals.find_differences(expected)
        if not differences or is_over() or time.monotonic() >= end:
            return differences
        if totals.lines.total() != seen:
            end, seen = time.monotonic() + within, totals.lines.total()
        time.sleep(POLL_INTERVAL)
