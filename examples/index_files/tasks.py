"""Tasks: what is done with each file, one function each. Start reading here.

A task is a function that says `@task`. What it takes and returns is annotated: arguments travel as JSON and arrive as
what the annotations say, a `Path` as a `Path`.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import trio

from celery5 import current_job, task

PORTION = 1 << 20
"""Bytes read at once: no file is ever whole in memory."""

FIRST_ATTEMPT = 1


class Seen(msgspec.Struct):
    """What reading a file tells."""

    bytes: int
    lines: int


@task  # async def: for what waits. Hundreds of these run at once in the worker's Trio loop.
async def read(path: Path) -> Seen | None:
    """Read a file and tell its size and its lines; None when it cannot be read."""
    seen = Seen(bytes=0, lines=0)
    try:
        async with await trio.open_file(path, "rb") as file:
            whole = False
            while not whole:
                portion = await file.read(PORTION)
                seen.bytes += len(portion)
                seen.lines += portion.count(b"\n")
                whole = len(portion) < PORTION
    except OSError:
        return None
    return seen


@task  # def: for what computes. These run in threads, a few at a time, and the loop goes on meanwhile.
def digest(path: Path) -> str | None:
    """The SHA-256 of a file; None when it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


@task
def count_words(path: Path) -> int | None:
    """How many words a file has, whatever stands between white space; None when it cannot be read."""
    words, in_a_word = 0, False
    try:
        with path.open("rb") as file:
            while portion := file.read(PORTION):
                words += len(portion.split()) - (in_a_word and not portion[:1].isspace())
                in_a_word = not portion[-1:].isspace()
    except OSError:
        return None
    return words


@task(max_retries=3, backoff=0.2)  # up to 3 further attempts, after at most 0.2, 0.4 and 0.8 s
async def ask_a_flaky_service() -> int:
    """Fail at the first attempt, as services do, and succeed at the next: gives the attempt that succeeded."""
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
