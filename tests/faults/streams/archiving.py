"""Application: a stream with an archive that may hang once it has written, as a worker of the tests runs it."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from celery5 import App
from celery5.streams import FileArchive, Keep, StoredRecord, Stream

RECORDS = 300
"""Records that the one partition keeps."""


class HangingArchive:
    """A FileArchive that never returns while there is a file `hang` beside its folder."""

    def __init__(self, folder: Path) -> None:
        self._files = FileArchive(folder / "archive")
        self._hang = folder / "hang"

    def __call__(self, stream: str, partition: int, entries: Sequence[StoredRecord]) -> None:
        """Write records."""
        self._files(stream, partition, entries)
        while self._hang.exists():
            time.sleep(0.01)


def declare_readings(app: App, folder: Path) -> Stream[int]:
    """Declare the stream."""
    keep = Keep(records=RECORDS, full="archive", archive=HangingArchive(folder))
    return app.stream("readings", int, by=str, partitions=1, keep=keep)


app = App(os.environ.get("HISTORY_APP", "archiving"))
readings = declare_readings(app, Path(os.environ.get("ARCHIVE_FOLDER", "/nonexistent")))
