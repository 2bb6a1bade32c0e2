"""Write reports in the protocol of StatsD.

Source: https://github.com/statsd/statsd/blob/master/docs/metric_types.md, and DogStatsD for labels as tags.
"""

from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from celery5.errors import Misconfigured
from celery5.protocol.observability.report import MetricsReport, Series, get_labels

MAX_DATAGRAM = 1432
"""Bytes of one datagram: what fits into a packet of Ethernet."""
QUANTILES = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
"""The percentiles that are sent, and what they are called."""


class StatsDAddress(NamedTuple):
    """Where a StatsD listens, and how it takes labels."""

    host: str
    port: int
    # Labels are tags, as DogStatsD has them; else they are parts of the name.
    has_tags: bool


def parse_statsd_address(text: str) -> StatsDAddress:
    """Return the address of `udp://host:port` or `udp://host:port?tags=dogstatsd`. Raises Misconfigured."""
    parts = urlsplit(text)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    tags = parse_qs(parts.query).get("tags", ["none"])[0]
    if parts.scheme != "udp" or not host or not port or tags not in ("none", "dogstatsd"):
        raise Misconfigured(
            f"statsd is {text!r}: give udp://host:port, followed by ?tags=dogstatsd for labels as tags"
        )
    return StatsDAddress(host, port, tags == "dogstatsd")


def parse_optional_statsd_address(text: str) -> StatsDAddress | None:
    """The same; None for an empty text. Raises Misconfigured."""
    return parse_statsd_address(text) if text else None


def make_datagrams(report: MetricsReport, *, has_tags: bool, prefix: str = "") -> Iterator[bytes]:
    """Yield the datagrams of a report.

    Counters are sent as what was added, gauges as they stand, of durations the count and three percentiles.
    """
    lines, size = list[bytes](), 0
    for series, suffix, value, kind in _list_numbers(report):
        line = _make_line(prefix, series, suffix, value, kind, has_tags=has_tags)
        if lines and size + len(line) > MAX_DATAGRAM:
            yield b"\n".join(lines)
            lines, size = [], 0
        lines.append(line)
        size += len(line) + 1
    if lines:
        yield b"\n".join(lines)


def _list_numbers(report: MetricsReport) -> Iterator[tuple[Series, str, float, str]]:
    measured = report.measurements
    for series, value in measured.counters.items():
        yield series, "", value, "c"
    for series, value in measured.gauges.items():
        yield series, "", value, "g"
    for series, sketch in measured.sketches.items():
        yield series, ".count", sketch.count, "c"
        for fraction, name in QUANTILES:
            yield series, f".{name}", sketch.quantile(fraction) or 0.0, "g"


def _make_line(prefix: str, series: Series, suffix: str, value: float, kind: str, *, has_tags: bool) -> bytes:
    name = prefix + series[0].replace("celery5_", "celery5.", 1)
    labels = get_labels(series)
    number = str(int(value)) if value == int(value) else f"{value:.6f}"
    if not has_tags:
        words = [name, *map(_quote, labels.values())]
        return f"{'.'.join(words)}{suffix}:{number}|{kind}".encode()
    tags = ",".join(f"{label}:{_quote_tag(text)}" for label, text in labels.items())
    return f"{name}{suffix}:{number}|{kind}{'|#' if tags else ''}{tags}".encode()


def _quote(text: str) -> str:
    """Return a label as a part of a name: dots divide names there."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in text) or "_"


def _quote_tag(text: str) -> str:
    return "".join("_" if letter in ",|:#@\n\r" else letter for letter in text)
