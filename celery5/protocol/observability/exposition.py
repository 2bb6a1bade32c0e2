"""Write metrics as text for Prometheus, in its own format or as OpenMetrics.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/ (0.0.4) and https://openmetrics.io (1.0.0)
"""

import math
from collections.abc import Iterable, Iterator

import msgspec

from celery5.protocol.observability.families import Exemplar, Labels, MetricFamily, SketchSample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""What the text is sent as."""
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
"""What the text is sent as to a client that asks for OpenMetrics."""
BOUNDS = range(-10, 13)
"""Exponents of the bounds of a histogram's buckets: powers of two from a millisecond to 68 minutes."""


def accepts_openmetrics(accept: str) -> bool:
    """Return whether a client takes OpenMetrics, by its header `Accept`, and does not like the plain text better."""
    shares = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for part in accept[:1000].lower().split(","):
        media, *parameters = (word.strip() for word in part.split(";"))
        quality = next((word[2:] for word in parameters if word.startswith("q=")), "1")
        try:
            share = float(quality)
        except ValueError:
            share = 0.0
        if media in shares:
            shares[media] = max(shares[media], share)
    return 0 < shares["application/openmetrics-text"] >= shares["text/plain"]


def format_exposition(metric_families: Iterable[MetricFamily], *, openmetrics: bool = False) -> bytes:
    """Return metrics as text. A family that occurs twice is written once, with the samples of both."""
    merged: dict[str, MetricFamily] = {}
    for family in metric_families:
        if first := merged.get(family.name):
            family = msgspec.structs.replace(
                first,
                samples=[*first.samples, *family.samples],
                sketches=[*first.sketches, *family.sketches],
            )
        merged[family.name] = family
    lines = [line for family in merged.values() for line in _make_lines(family, openmetrics=openmetrics)]
    if openmetrics:
        lines.append("# EOF\n")
    return "".join(lines).encode("utf-8", "backslashreplace")


def _make_lines(family: MetricFamily, *, openmetrics: bool) -> Iterator[str]:
    # OpenMetrics names a counter without `_total`, and its only sample with it.
    name = family.name.removesuffix("_total") if openmetrics and family.kind == "counter" else family.name
    help_text = family.help.replace("\\", "\\\\").replace("\n", "\\n")
    yield f"# HELP {name} {help_text.replace(chr(34), chr(92) + chr(34)) if openmetrics else help_text}\n"
    yield f"# TYPE {name} {family.kind}\n"
    for sample in family.samples:
        yield f"{family.name}{_in_braces(sample.labels)} {_number(sample.value)}\n"
    for sketch in family.sketches:
        yield from _make_bucket_lines(family.name, sketch, openmetrics=openmetrics)


def _make_bucket_lines(name: str, sample: SketchSample, *, openmetrics: bool) -> Iterator[str]:
    labels, count, exemplar = sample.labels, sample.sketch.count, sample.exemplar if openmetrics else None
    for exponent, below in zip(BOUNDS, sample.sketch.count_up_to(BOUNDS), strict=True):
        bound = _number(2.0**exponent)
        le = f"{bound}.0" if openmetrics and exponent >= 0 else bound
        line = f"{name}_bucket{_in_braces({**labels, 'le': le})} {below}"
        if exemplar is not None and exemplar.value <= 2.0**exponent:
            line, exemplar = line + _format_exemplar(exemplar), None
        yield line + "\n"
    last = "" if exemplar is None else _format_exemplar(exemplar)
    yield f"{name}_bucket{_in_braces({**labels, 'le': '+Inf'})} {count}{last}\n"
    yield f"{name}_sum{_in_braces(labels)} {_number(round(sample.sketch.total, 6))}\n"
    yield f"{name}_count{_in_braces(labels)} {count}\n"


def _format_exemplar(exemplar: Exemplar) -> str:
    _, trace_id, span_id, _ = exemplar.traceparent.split("-", 3)
    labels = _in_braces({"trace_id": trace_id, "span_id": span_id})
    return f" # {labels} {_number(exemplar.value)} {exemplar.at:.3f}"


def _in_braces(labels: Labels) -> str:
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    whole = value == int(value) and abs(value) < 2**53
    return str(int(value)) if whole else repr(float(value))
