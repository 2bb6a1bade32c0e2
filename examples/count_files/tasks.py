"""Count a file, and add counts up."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from celery5 import Workflow
from celery5.examples.count_files import app


@dataclass
class Count:
    """What is in some files."""

    files: int = 0
    lines: int = 0
    words: int = 0
    size: int = 0

    def __add__(self, other: "Count") -> "Count":
        return Count(
            self.files + other.files,
            self.lines + other.lines,
            self.words + other.words,
            self.size + other.size,
        )


@app.task
def count_file(path: str) -> Count:
    """Count one file. A `def` runs in a thread, where files may be read."""
    text = Path(path).read_bytes()
    return Count(1, text.count(b"\n"), len(text.split()), len(text))


@app.task
async def add_up(counts: list[Count]) -> Count:
    """Add up what all jobs have counted."""
    return sum(counts, start=Count())


def count_files(folder: Path) -> Workflow[Count]:
    """Return a workflow that counts all files below a folder. Its list of files is never in memory as a whole."""
    return count_file.map(list_files(folder)) | add_up.s()


def list_files(folder: Path) -> Iterator[str]:
    """Yield the path of each file below a folder, always in the same order. Raises OSError."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from list_files(path)
        elif path.is_file():
            yield str(path)


def count_plainly(folder: Path) -> Count:
    """Return what a loop over all files counts. Raises OSError."""
    total = Count()
    for path in list_files(folder):
        text = Path(path).read_bytes()
        total += Count(1, text.count(b"\n"), len(text.split()), len(text))
    return total
