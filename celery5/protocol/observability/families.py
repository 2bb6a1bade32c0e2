"""The values that metrics are made of."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from celery5.protocol.observability.sketch import Sketch

Labels = Mapping[str, str]
Merge = Literal["sum", "max", ""]
"""How the gauges of several processes become one: their sum, the largest of them, or not at all."""


class Sample(msgspec.Struct, frozen=True):
    """One number with its labels."""

    value: float
    labels: Labels = {}


class Exemplar(NamedTuple):
    """One job that stands for a bucket of a histogram."""

    # Its trace, as W3C's traceparent.
    traceparent: str
    # What was measured of it, in seconds.
    value: float
    # When, in seconds since 1970.
    at: float


class SketchSample(msgspec.Struct, frozen=True):
    """One distribution with its labels."""

    sketch: Sketch
    labels: Labels = {}
    exemplar: Exemplar | None = None


class MetricFamily(msgspec.Struct, frozen=True):
    """The samples of one metric."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    # Of a counter or a gauge.
    samples: Sequence[Sample] = ()
    # Of a histogram.
    sketches: Sequence[SketchSample] = ()
    # Of a gauge: what it is in a cluster.
    merge: Merge = "sum"


def make_gauge(
    name: str,
    help: str,  # noqa: A002  the format's word
    *samples: tuple[float, Labels] | float,
    merge: Merge = "sum",
) -> MetricFamily:
    """Return a gauge: a number that goes up and down."""
    return MetricFamily(name, "gauge", help, _samples(samples), merge=merge)


def make_counter(name: str, help: str, *samples: tuple[float, Labels] | float) -> MetricFamily:  # noqa: A002  the format's word
    """Return a counter: a number that only goes up, from 0 at the start. Its name ends in `_total`."""
    return MetricFamily(name, "counter", help, _samples(samples))


def make_histogram(name: str, help: str, *sketches: tuple[Sketch, Labels, Exemplar | None]) -> MetricFamily:  # noqa: A002  the format's word
    """Return a histogram: how durations are distributed."""
    return MetricFamily(name, "histogram", help, sketches=[SketchSample(*sketch) for sketch in sketches])


def _samples(samples: Iterable[tuple[float, Labels] | float]) -> list[Sample]:
    return [Sample(*sample) if isinstance(sample, tuple) else Sample(sample) for sample in samples]
