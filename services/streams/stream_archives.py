"""The archives of all streams of a worker. What serves one of them is loaded where a stream has one."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import trio

from celery5.broker.driver import AsyncDriver
from celery5.logs.log import Log
from celery5.protocol.observability.families import MetricFamily, make_counter, make_gauge
from celery5.services.streams import stream_archiver

if TYPE_CHECKING:
    from celery5.streams.stream import Stream


class StreamArchives:
    """Archives the records of all streams that have an archive. A worker without such a stream does nothing here.

    Args:
        redis: The driver of the broker.
        archived_streams: The streams with an archive.
        worker: The incarnation of this worker.
        log: Where it says what has failed.
    """

    def __init__(
        self, *, redis: AsyncDriver, archived_streams: "Sequence[Stream[Any]]", worker: str, log: Log
    ) -> None:
        self._archivers = [
            stream_archiver.StreamArchiver(stream, stream.keep.archive, redis, worker, log)
            for stream in archived_streams
            if stream.keep.archive is not None
        ]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Archive until cancelled."""
        task_status.started()
        async with trio.open_nursery() as nursery:
            for archiver in self._archivers:
                nursery.start_soon(archiver.serve)
            await trio.sleep_forever()

    def conditions(self) -> Mapping[str, str]:
        """Return nothing: a worker is ready also when an archive fails."""
        return {}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Return what was archived, and what waits; nothing where no stream has an archive."""
        if not self._archivers:
            return []
        by_stream = [({"stream": archiver.stream.name}, archiver) for archiver in self._archivers]
        return [
            make_counter(
                "celery5_stream_archived_records_total",
                "Records that this worker has given to the archive of a stream.",
                *[(archiver.archived, labels) for labels, archiver in by_stream],
            ),
            make_counter(
                "celery5_stream_archive_failures_total",
                "How often the archive of a stream has failed in this worker.",
                *[(archiver.failures, labels) for labels, archiver in by_stream],
            ),
            make_gauge(
                "celery5_stream_archive_waiting_records",
                "Records of a stream that wait for its archive.",
                *[(archiver.waiting, labels) for labels, archiver in by_stream],
            ),
        ]
