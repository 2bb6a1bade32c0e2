"""Find log files, read their lines, and count them in one process without a stream.

A folder has a folder for each host; a file that lies in no folder is of a host of its own.
"""

import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from celery5.streams import Record

PART_SIZE = 32 << 10
"""Bytes of a part of a file, about: a part ends where a line does."""
ALERT_AT = 10
"""Errors of a host in one minute that raise an alert."""
_MINUTES = (
    re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d)"),  # 2026-01-31T12:00:59
    re.compile(r"([A-Z][a-z]{2} [ \d]\d \d\d:\d\d)"),  # Jan 31 12:00:59
    re.compile(r"\S+ \S+ \S+ \[(\d\d/[A-Z][a-z]{2}/\d{4}:\d\d:\d\d)"),  # 10.0.0.1 - - [31/Jan/2026:12:00:59
)
_ERROR = re.compile(r"\b(error|critical|fatal)\b", re.IGNORECASE)


class FilePart(Record):
    """Some lines of a file. A file that is rotated is another one: its number in the file system is."""

    host: str
    path: str
    inode: int
    start: int
    end: int


class LogLine(Record):
    """A line: when it was written, and whether it is an error."""

    host: str
    minute: str
    is_error: bool


class MinuteCount(Record):
    """The lines of a host in one minute."""

    host: str
    minute: str
    lines: int = 0
    errors: int = 0


class ErrorAlert(Record):
    """A host has written too many errors in one minute."""

    host: str
    minute: str


class LogTotals:
    """The counts of all hosts, and the alerts."""

    def __init__(self) -> None:
        self.lines: Counter[tuple[str, str]] = Counter()
        self.errors: Counter[tuple[str, str]] = Counter()
        self.alerts: Counter[tuple[str, str]] = Counter()

    def find_differences(self, expected: "LogTotals") -> list[str]:
        """Return in words how this differs from what is expected."""
        return [
            f"{what} of {host} at {minute or 'no time'}: {actual[host, minute]} instead of {wanted[host, minute]}"
            for what, actual, wanted in (
                ("lines", self.lines, expected.lines),
                ("errors", self.errors, expected.errors),
                ("alerts", self.alerts, expected.alerts),
            )
            for host, minute in sorted(actual.keys() | wanted.keys())
            if actual[host, minute] != wanted[host, minute]
        ]


def list_files(folder: Path) -> list[tuple[str, Path]]:
    """Return the host and the path of each file below a folder that can be read, sorted. Raises OSError."""
    found: list[tuple[str, Path]] = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            try:
                path.open("rb").close()
            except OSError:
                continue
            inside = path.relative_to(folder)
            found.append((inside.parts[0] if len(inside.parts) > 1 else inside.stem, path))
    return found


def list_parts(folder: Path) -> Iterator[FilePart]:
    """Yield the parts of all files, those of a file in their order. A line that has no end yet is in none.

    Raises OSError.
    """
    for host, path in list_files(folder):
        with path.open("rb") as file:
            inode, start = os.fstat(file.fileno()).st_ino, 0
            while portion := file.read(PART_SIZE) + file.readline():
                end = start + portion.rfind(b"\n") + 1
                if end > start:
                    yield FilePart(host=host, path=str(path), inode=inode, start=start, end=end)
                start += len(portion)


def read_lines(part: FilePart, minute: str) -> Iterator[LogLine]:
    """Yield the lines of a part. `minute` is that of the line before; one without a time has that. Raises OSError."""
    with open(part.path, "rb") as file:
        file.seek(part.start)
        for raw in file.read(part.end - part.start).split(b"\n")[:-1]:
            text = raw.decode(errors="replace")
            minute = find_minute(text) or minute
            yield LogLine(host=part.host, minute=minute, is_error=bool(_ERROR.search(text)))


def find_minute(line: str) -> str:
    """Return the minute in which a line was written; nothing when it does not begin with a time."""
    for pattern in _MINUTES:
        found = pattern.match(line)
        if found:
            return found[1]
    return ""


def count_plainly(folder: Path) -> LogTotals:
    """Return what a loop over all files counts. Raises OSError."""
    totals = LogTotals()
    for host, path in list_files(folder):
        minute = ""
        *lines, _ = path.read_bytes().split(
            b"\n"
        )  # behind the last end of a line is one that is not whole yet
        for raw in lines:
            line = raw.decode(errors="replace")
            minute = find_minute(line) or minute
            totals.lines[host, minute] += 1
            if _ERROR.search(line):
                totals.errors[host, minute] += 1
    totals.alerts.update(key for key, errors in totals.errors.items() if errors >= ALERT_AT)
    return totals


def make_files(folder: Path, *, hosts: int = 5, minutes: int = 30, lines: int = 400) -> None:
    """Write log files of so many hosts, with so many lines a minute, about. The same arguments give the same files."""
    numbers, start = random.Random(5), datetime(2026, 1, 31, 12, tzinfo=UTC)
    for host in range(hosts):
        for name in ("web", "database"):
            path = folder / f"host-{host}" / f"{name}.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                for minute in range(minutes):
                    share = 0.1 if numbers.random() < 0.1 else 0.01
                    for number in range(numbers.randrange(lines)):
                        at = start + timedelta(minutes=minute, seconds=number * 60 / lines)
                        is_error = numbers.random() < share
                        level = "ERROR" if is_error else "INFO"
                        file.write(f"{at:%Y-%m-%dT%H:%M:%S} {level} request {number} of {name}\n")
                        if is_error:
                            file.write("  raised in line 7\n")
