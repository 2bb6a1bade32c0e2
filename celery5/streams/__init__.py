"""Send ordered records, and process them partition by partition."""

from typing import TYPE_CHECKING

from celery5.lazy import exports
from celery5.lazy_modules import load_lazily

if TYPE_CHECKING:
    from celery5.protocol.streams.windows import Hopping, Tumbling
    from celery5.streams.archive import FileArchive
    from celery5.streams.blocking_events import BlockingEvents
    from celery5.streams.codec import Compressor, RecordCodec, Serializer
    from celery5.streams.dead_records import DeadRecordQuery, DeadRecords, DeadRecordTally, StoredDeadRecord
    from celery5.streams.entry import StoredRecord, StreamEntry
    from celery5.streams.events import StreamEvents
    from celery5.streams.lags import GroupLag, PartitionLag, StreamState
    from celery5.streams.middleware import ProcessorMiddleware, RecordSkipped
    from celery5.streams.operations import GroupIsLive, GroupNotEmpty, WindowsAreOpen
    from celery5.streams.parked_keys import ParkedKeyRegistry, ParkedKeyState
    from celery5.streams.processor import Processor
    from celery5.streams.record import Record
    from celery5.streams.registry import Streams
    from celery5.streams.stream import Keep, RecordId, Stream
    from celery5.streams.windows import TooManyWindows, Window, Windows

__all__ = [
    "BlockingEvents",
    "Compressor",
    "DeadRecordQuery",
    "DeadRecordTally",
    "DeadRecords",
    "FileArchive",
    "GroupIsLive",
    "GroupLag",
    "GroupNotEmpty",
    "Hopping",
    "Keep",
    "ParkedKeyRegistry",
    "ParkedKeyState",
    "PartitionLag",
    "Processor",
    "ProcessorMiddleware",
    "Record",
    "RecordCodec",
    "RecordId",
    "RecordSkipped",
    "Serializer",
    "StoredDeadRecord",
    "StoredRecord",
    "Stream",
    "StreamEntry",
    "StreamEvents",
    "StreamState",
    "Streams",
    "TooManyWindows",
    "Tumbling",
    "Window",
    "Windows",
    "WindowsAreOpen",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "BlockingEvents": "celery5.streams.blocking_events",
            "ProcessorMiddleware": "celery5.streams.middleware",
            "RecordSkipped": "celery5.streams.middleware",
            "Compressor": "celery5.streams.codec",
            "Record": "celery5.streams.record",
            "RecordCodec": "celery5.streams.codec",
            "Serializer": "celery5.streams.codec",
            "StreamEntry": "celery5.streams.entry",
            "StreamEvents": "celery5.streams.events",
            "StoredDeadRecord": "celery5.streams.dead_records",
            "DeadRecordQuery": "celery5.streams.dead_records",
            "DeadRecordTally": "celery5.streams.dead_records",
            "DeadRecords": "celery5.streams.dead_records",
            "FileArchive": "celery5.streams.archive",
            "StoredRecord": "celery5.streams.entry",
            "GroupNotEmpty": "celery5.streams.operations",
            "GroupIsLive": "celery5.streams.operations",
            "GroupLag": "celery5.streams.lags",
            "Keep": "celery5.streams.stream",
            "ParkedKeyRegistry": "celery5.streams.parked_keys",
            "ParkedKeyState": "celery5.streams.parked_keys",
            "PartitionLag": "celery5.streams.lags",
            "Processor": "celery5.streams.processor",
            "RecordId": "celery5.streams.stream",
            "Stream": "celery5.streams.stream",
            "StreamState": "celery5.streams.lags",
            "Streams": "celery5.streams.registry",
            "Hopping": "celery5.protocol.streams.windows",
            "Tumbling": "celery5.protocol.streams.windows",
            "TooManyWindows": "celery5.streams.windows",
            "Window": "celery5.streams.windows",
            "Windows": "celery5.streams.windows",
            "WindowsAreOpen": "celery5.streams.operations",
        },
    )

load_lazily(__name__, "lags", "processor", "stream")
