"""Read, hash and count one file: a task for each. Start reading with this module.

A task is a function with the decorator `@task`. Its parameters and its result are annotated: arguments travel as JSON,
and arrive as the annotated types, a `Path` as a `Path`.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import trio

from celery5 import current_job, task

PORTION = 1 << 20
"""Bytes read at once, so that no file is completely in memory."""

FIRST_ATTEMPT = 1


class Seen(msgspec.Struct):
    """The size and the lines of a file."""

    bytes: int
    lines: int


@task  # async def is for tasks that wait. Hundreds of their jobs run at once in the worker's Trio loop.
async def read(path: Path) -> Seen | None:
    """Return the size and the lines of a file; None if it cannot be read."""
    contents = Seen(bytes=0, lines=0)
    try:
        async with await trio.open_file(path, "rb") as file:
            at_end = False
            while not at_end:
                chunk = await file.read(PORTION)
                contents.bytes += len(chunk)
                contents.lines += chunk.count(b"\n")
                at_end = len(chunk) < PORTION
    except OSError:
        return None
    return contents


@task  # def is for tasks that compute. Their jobs run in threads, a few at a time, beside the loop.
def digest(path: Path) -> str | None:
    """Return the SHA-256 of a file; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


@task
def count_words(path: Path) -> int | None:
    """Return the number of words in a file, separated by white space; None if it cannot be read."""
    words, in_a_word = 0, False
    try:
        with path.open("rb") as file:
            while chunk := file.read(PORTION):
                words += len(chunk.split()) - (in_a_word and not chunk[:1].isspace())
                in_a_word = not chunk[-1:].isspace()
    except OSError:
        return None
    return words


@task(max_retries=3, backoff=0.2)  # up to 3 further attempts, after at most 0.2, 0.4 and 0.8 s
async def ask_a_flaky_service() -> int:
    """Fail at the first attempt, as services do, and succeed at the next. Return the number of the attempt."""
    job = current_job()
    attempt = job.attempt if job else FIRST_ATTEMPT
    if attempt == FIRST_ATTEMPT:
        raise ConnectionError("the service is having a moment; try again")
    return attempt


@task(max_retries=1, backoff=0.1)
async def read_catalogue(path: Path) -> dict[str, Any]:
    """Read a JSON file. A broken file stays broken: after its last attempt the job is dead."""
    catalogue: dict[str, Any] = json.loads(await trio.Path(path).read_text())
    return catalogue
