"""Metrics: numbers under names and labels, and the text in which Prometheus reads them.

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
    """One number, with its labels. `suffix` goes on the family's name."""

    value: float
    labels: Labels = {}
    suffix: str = ""


class MetricFamily(msgspec.Struct, frozen=True):
    """Numbers of one name, one kind and one meaning."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: Sequence[Sample]


def make_gauge(name: str, help: str, *samples: tuple[float, Labels] | float) -> MetricFamily:  # noqa: A002  the format's word
    """Numbers that go up and down."""
    return MetricFamily(name, "gauge", help, _samples(samples))


def make_counter(name: str, help: str, *samples: tuple[float, Labels] | float) -> MetricFamily:  # noqa: A002  the format's word
    """Numbers that go up, from 0 when the process began. The name ends in `_total`."""
    return MetricFamily(name, "counter", help, _samples(samples))


def _samples(samples: Iterable[tuple[float, Labels] | float]) -> list[Sample]:
    return [Sample(*each) if isinstance(each, tuple) else Sample(each) for each in samples]


class JobTally:
    """How often jobs of each task have ended in each state, and how long they took.

    A plain list for each: the sum of the seconds, then a count for each bucket. Whoever counts does so by two
    additions, `tally[0] += seconds` and `tally[bisect_left(EDGES, seconds)] += 1`: it is on the way of every job.
    """

    def __init__(self) -> None:
        self._states: dict[str, dict[str, list[float]]] = {}

    def get_tallies(self, state: str) -> dict[str, list[float]]:
        """The tallies of one state, by task; one that is asked for is there."""
        return self._states.setdefault(state, defaultdict(_empty))

    def count_jobs(self) -> dict[tuple[str, str], int]:
        """How many jobs have ended, by task and state."""
        return {
            (task, state): int(sum(tally[1:]))
            for state, tasks in self._states.items()
            for task, tally in list(tasks.items())
        }

    def sum_durations(self) -> dict[str, tuple[int, float]]:
        """How many jobs of each task have ended, and how many seconds all of them took."""
        found: dict[str, tuple[int, float]] = {}
        for tasks in self._states.values():
            for task, tally in list(tasks.items()):
                count, seconds = found.get(task, (0, 0.0))
                found[task] = (count + int(sum(tally[1:])), seconds + tally[0])
        return found

    def count_by_state(self) -> dict[str, int]:
        """How many jobs have ended, by state; states in which none has are left out."""
        found = {
            state: int(sum(sum(each[1:]) for each in list(tasks.values())))
            for state, tasks in self._states.items()
        }
        return {state: count for state, count in found.items() if count}

    def metric_families(self) -> list[MetricFamily]:
        """All of it as metrics."""
        counts = [
            (float(count), {"task": task, "state": state})
            for (task, state), count in self.count_jobs().items()
        ]
        tasks: dict[str, list[list[float]]] = {}
        for each in self._states.values():
            for task, tally in list(each.items()):
                tasks.setdefault(task, []).append(tally)
        samples = [
            sample for task, tallies in tasks.items() for sample in _durations(tallies, {"task": task})
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
"""What `bisect_left` finds the place of a duration in, in a tally."""


def _empty() -> list[float]:
    return [0.0] * (len(BUCKET_BOUNDS) + 2)


def _durations(tallies: Sequence[Sequence[float]], labels: Labels) -> list[Sample]:
    """The samples of one histogram, of several tallies."""
    samples: list[Sample] = []
    below = 0.0
    for index, bound in enumerate((*BUCKET_BOUNDS, math.inf), 1):
        below += sum(each[index] for each in tallies)
        samples.append(Sample(below, {**labels, "le": _number(bound)}, "_bucket"))
    samples.append(Sample(sum(each[0] for each in tallies), labels, "_sum"))
    samples.append(Sample(below, labels, "_count"))
    return samples


def format_exposition(metric_families: Iterable[MetricFamily]) -> bytes:
    """All of it as text. A family that comes twice is written once, with the samples of both."""
    merged: dict[str, MetricFamily] = {}
    for each in metric_families:
        known = merged.get(each.name)
        merged[each.name] = (
            each if known is None else msgspec.structs.replace(known, samples=[*known.samples, *each.samples])
        )
    return "".join(map(_text, merged.values())).encode("utf-8", "backslashreplace")


def _text(family: MetricFamily) -> str:
    said = family.help.replace("\\", "\\\\").replace("\n", "\\n")
    lines = [f"# HELP {family.name} {said}", f"# TYPE {family.name} {family.kind}"]
    for each in family.samples:
        labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in each.labels.items())
        lines.append(f"{family.name}{each.suffix}{f'{{{labels}}}' if labels else ''} {_number(each.value)}")
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    whole = value == int(value) and abs(value) < 2**53
    return str(int(value)) if whole else repr(float(value))
