"""Measure for /metrics how far the groups of this worker's processors are behind, and who owns their partitions."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import trio

from celery5.broker.driver import AsyncDriver
from celery5.errors import BrokerError
from celery5.logs.log import Log
from celery5.protocol.observability.families import MetricFamily, make_gauge
from celery5.streams import lags

if TYPE_CHECKING:
    from celery5.streams.processor import Processor

LAG_INTERVAL = 5.0
"""The least seconds between two measurements of all groups."""
INTERVAL_PER_CALL = 2.0
"""Seconds between two measurements for each call, so that many partitions cost at most half a call in a second."""
MAX_MEASURED_GROUPS = 64
"""The most groups that are measured."""


class GroupLags:
    """Measures the groups of the processors that this worker runs. A process without a status port measures nothing.

    Args:
        redis: The driver of the broker.
        processors: The processors.
        is_measuring: Whether anybody can see it.
        log: Where it says what it could not measure.
    """

    only_observes: ClassVar = True

    def __init__(
        self, *, redis: AsyncDriver, processors: "Sequence[Processor[Any]]", is_measuring: bool, log: Log
    ) -> None:
        self._redis = redis
        by_name = sorted(processors, key=lambda processor: (processor.stream.name, processor.name))
        self._processors = by_name[:MAX_MEASURED_GROUPS] if is_measuring else []
        self._left_out = by_name[MAX_MEASURED_GROUPS:] if is_measuring else []
        self._log = log
        self._lags: dict[tuple[str, str], lags.GroupLag] = {}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Measure until cancelled."""
        task_status.started()
        if not self._processors:
            await trio.sleep_forever()
        if self._left_out:
            first = f"{self._left_out[0].stream.name}:{self._left_out[0].name}"
            self._log.event(
                "lags:truncated", "warning", groups=len(self._left_out), first=first, most=MAX_MEASURED_GROUPS
            )
        try:
            while True:
                calls = 0
                for processor in self._processors:
                    calls += await self._measure(processor)
                await trio.sleep(max(LAG_INTERVAL, INTERVAL_PER_CALL * calls))
        finally:
            self._lags.clear()

    async def _measure(self, processor: "Processor[Any]") -> int:
        """Measure one group; return about how many calls that took."""
        keys, name = processor.stream.keys, processor.name
        try:
            lag = await lags.measure_group(keys, self._redis, name)
        except BrokerError as error:
            # An old number would hide that the lag is unknown now.
            self._lags.pop((keys.stream, name), None)
            self._log.event("lags:read-failed", "debug", stream=keys.stream, processor=name, why=str(error))
            return 1
        self._lags[keys.stream, name] = lag
        return 1 + -(-len(lag.partitions) // lags.PARTITIONS_PER_CALL)

    def conditions(self) -> Mapping[str, str]:
        """Return nothing: a worker is ready also when a group is behind."""
        return {}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Return lags, owners and quarantines; nothing where none is measured."""
        if not self._lags:
            return []
        groups = [({"stream": stream, "group": group}, lag) for (stream, group), lag in self._lags.items()]
        return [
            make_gauge(
                "celery5_stream_lag_records",
                "Records that the group has not done.",
                *[(lag.lag, labels) for labels, lag in groups],
                merge="max",
            ),
            make_gauge(
                "celery5_stream_lag_seconds",
                "Age in seconds of the first record that the group has not done; 0 when it has done all.",
                *[(lag.age, labels) for labels, lag in groups],
                merge="max",
            ),
            make_gauge(
                "celery5_stream_members",
                "Workers that run the group.",
                *[(len(lag.members), labels) for labels, lag in groups],
                merge="max",
            ),
            make_gauge(
                "celery5_stream_partitions",
                "Partitions of the group by state: owned, unowned or quarantined.",
                *[
                    (count, {**labels, "state": state})
                    for labels, lag in groups
                    for state, count in _count_states(lag).items()
                ],
                merge="max",
            ),
            *_count_records(groups),
        ]


def _count_records(groups: "Sequence[tuple[dict[str, str], lags.GroupLag]]") -> list[MetricFamily]:
    """Return how many records of groups are not processed as usual."""
    return [
        make_gauge(
            "celery5_stream_lost_records",
            "Records that were dropped before the group has read them, and that it has not come to yet.",
            *[(sum(partition.lost for partition in lag.partitions), labels) for labels, lag in groups],
            merge="max",
        ),
        make_gauge(
            "celery5_stream_late_records",
            "Records that came after a window of theirs had closed.",
            *[(sum(partition.late for partition in lag.partitions), labels) for labels, lag in groups],
            merge="max",
        ),
        make_gauge(
            "celery5_stream_dead_records",
            "Records that the group has given up.",
            *[(lag.dead, labels) for labels, lag in groups],
            merge="max",
        ),
        make_gauge(
            "celery5_stream_parked_keys",
            "Keys that the group has parked.",
            *[(lag.parked_keys, labels) for labels, lag in groups],
            merge="max",
        ),
        make_gauge(
            "celery5_stream_parked_records",
            "Records of parked keys.",
            *[(lag.parked_records, labels) for labels, lag in groups],
            merge="max",
        ),
    ]


def _count_states(lag: "lags.GroupLag") -> dict[str, int]:
    counts = {"owned": 0, "unowned": 0, "quarantined": 0}
    for partition in lag.partitions:
        counts["quarantined" if partition.condition else "owned" if partition.owner else "unowned"] += 1
    return counts
