"""The options that all partitions of a processor have in common."""

from dataclasses import dataclass
from typing import Any

from celery5.streams.processor import Processor


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionOptions:
    """What all partitions of a processor have in common: `Processor` explains them."""

    group: str
    prefetch: int
    concurrency: int
    commit_every: int
    grace_period: float


def make_partition_options(processor: Processor[Any], *, grace_period: float) -> PartitionOptions:
    """Return the options of the partitions of a processor; `grace_period` is for one that declares none."""
    return PartitionOptions(
        group=processor.name,
        prefetch=processor.prefetch,
        concurrency=processor.concurrency,
        commit_every=processor.commit_every,
        grace_period=grace_period if processor.grace_period is None else processor.grace_period,
    )
