"""Hold metrics, and write them as text for Prometheus.

The text is Prometheus' exposition format, version 0.0.4: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""What the text is sent as."""
BUCKET_BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0, 1800.0)
"""Upper bounds in seconds of the buckets in which durations are counted."""

Labels = Mapping[str, str]


class Sample(msgspec.Struct, frozen=True):
    """One number with its labels. `suffix` is appended to the family's name."""

    value: float
    labels: Labels = {}
    suffix: str = ""


class MetricFamily(msgspec.Struct, frozen=True):
    """The samples of one metric."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: Sequence[Sample]


def make_gauge(name: str, help: str, *samples: tuple[float, Labels] | float) -> MetricFamily:  # noqa: A002  the format's word
    """Return a gauge: a number that goes up and down."""
    return MetricFamily(name, "gauge", help, _samples(samples))


def make_counter(name: str, help: str, *samples: tuple[float, Labels] | float) -> MetricFamily:  # noqa: A002  the format's word
    """Return a counter: a number that only goes up, from 0 at the start. Its name ends in `_total`."""
    return MetricFamily(name, "counter", help, _samples(samples))


def _samples(samples: Iterable[tuple[float, Labels] | float]) -> list[Sample]:
    return [Sample(*each) if isinstance(each, tuple) else Sample(each) for each in samples]


class JobTally:
    """How often jobs of each task have ended in each state, and how long they took.

    Each tally is a plain list: the sum of the seconds, then a count for each bucket. Each job costs only two additions:
    `tally[0] += seconds` and `tally[bisect_left(HISTOGRAM_BUCKETS, seconds)] += 1`.
    """

    def __init__(self) -> None:
        self._states: dict[str, dict[str, list[float]]] = {}

    def get_tallies(self, state: str) -> dict[str, list[float]]:
        """Return the tallies of one state, by task. A missing one is created on access."""
        return self._states.setdefault(state, defaultdict(_empty))

    def count_jobs(self) -> dict[tuple[str, str], int]:
        """Return how many jobs have ended, by task and state."""
        return {
            (task, state): int(sum(tally[1:]))
            for state, tasks in self._states.items()
            for task, tally in list(tasks.items())
        }

    def sum_durations(self) -> dict[str, tuple[int, float]]:
        """Return how many jobs of each task have ended, and how many seconds they took together."""
        durations: dict[str, tuple[int, float]] = {}
        for tasks in self._states.values():
            for task, tally in list(tasks.items()):
                count, seconds = durations.get(task, (0, 0.0))
                durations[task] = (count + int(sum(tally[1:])), seconds + tally[0])
        return durations

    def count_by_state(self) -> dict[str, int]:
        """Return how many jobs have ended, by state; states without any are left out."""
        counts = {
            state: int(sum(sum(tally[1:]) for tally in list(tasks.values())))
            for state, tasks in self._states.items()
        }
        return {state: count for state, count in counts.items() if count}

    def metric_families(self) -> list[MetricFamily]:
        """Return the counts and durations as metrics."""
        counts = [
            (float(count), {"task": task, "state": state})
            for (task, state), count in self.count_jobs().items()
        ]
        tallies_by_task: dict[str, list[list[float]]] = {}
        for tasks in self._states.values():
            for task, tally in list(tasks.items()):
                tallies_by_task.setdefault(task, []).append(tally)
        samples = [
            sample
            for task, tallies in tallies_by_task.items()
            for sample in _make_histogram(tallies, {"task": task})
        ]
        return [
            make_counter(
                "celery5_jobs_total",
                "Attempts that have ended in this worker, by task and outcome.",
                *counts,
            ),
            MetricFamily("celery5_job_seconds", "histogram", "Seconds that attempts ran.", samples),
        ]


HISTOGRAM_BUCKETS = (-1.0, *BUCKET_BOUNDS)
"""The bounds in which `bisect_left` finds the index of a duration in a tally."""


def _empty() -> list[float]:
    return [0.0] * (len(BUCKET_BOUNDS) + 2)


def _make_histogram(tallies: Sequence[Sequence[float]], labels: Labels) -> list[Sample]:
    """Return the samples of one histogram from several tallies."""
    samples: list[Sample] = []
    below = 0.0
    for index, bound in enumerate((*BUCKET_BOUNDS, math.inf), 1):
        below += sum(tally[index] for tally in tallies)
        samples.append(Sample(below, {**labels, "le": _number(bound)}, "_bucket"))
    samples.append(Sample(sum(tally[0] for tally in tallies), labels, "_sum"))
    samples.append(Sample(below, labels, "_count"))
    return samples


def format_exposition(metric_families: Iterable[MetricFamily]) -> bytes:
    """Return metrics as text. A family that occurs twice is written once, with the samples of both."""
    merged: dict[str, MetricFamily] = {}
    for family in metric_families:
        if first := merged.get(family.name):
            family = msgspec.structs.replace(first, samples=[*first.samples, *family.samples])
        merged[family.name] = family
    return "".join(map(_text, merged.values())).encode("utf-8", "backslashreplace")


def _text(family: MetricFamily) -> str:
    help_text = family.help.replace("\\", "\\\\").replace("\n", "\\n")
    lines = [f"# HELP {family.name} {help_text}", f"# TYPE {family.name} {family.kind}"]
    for sample in family.samples:
        labels = ",".join(f'{name}="{_escape(value)}"' for name, value in sample.labels.items())
        in_braces = f"{{{labels}}}" if labels else ""
        lines.append(f"{family.name}{sample.suffix}{in_braces} {_number(sample.value)}")
    return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    whole = value == int(value) and abs(value) < 2**53
    return str(int(value)) if whole else repr(float(value))
