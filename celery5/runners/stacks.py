"""Read where the code of running jobs stands now, and format it like a traceback.

A stack has files, line numbers, functions and lines of source. It has no values of variables, which may be secrets.
Frames are read in the event loop; lines of source are read from files, so a thread formats them.
"""

import linecache
import sys
import traceback
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple, cast

import msgspec
import trio

from celery5.protocol.counts import choose_form, format_count
from celery5.protocol.masking import mask_lines
from celery5.runners import asyncio_thread, in_thread, on_trio
from celery5.runners.running_job import JobThread, RunningJob

MAX_WALK = 10_000
"""The most frames that are looked at for one stack."""
MAX_FRAMES = 100
"""The most frames of one stack that are shown: the innermost."""
MAX_STACKS = 200
"""The most stacks in one answer: more do not fit."""
MAX_CHILDREN = 1000
"""The most Trio tasks of one job that are looked at."""
MAX_SOURCE = 200
"""Characters of a line of source."""
MAX_SIZE = 64 * 1024
"""Bytes of an answer."""

_RUNNER_FILES = frozenset((on_trio.__file__, asyncio_thread.__file__, in_thread.__file__))
_DRIVERS = frozenset(
    (
        *((code.co_filename, code.co_name) for code in on_trio.DRIVER_CODES),
        (asyncio_thread.__file__, "__await__"),  # of AsyncioSoftLimit: to ask for its code would load asyncio
    )
)
"""The functions that drive the coroutine of a job, their local variable `coroutine`."""
_IN_BOX = "it runs in its own process, a box: its stack cannot be read from here"
_NOT_IN_FUNCTION = "its function does not run at this moment: it is about to begin, or has just ended"


class StackPlace(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    function: str


class JobStack(msgspec.Struct, frozen=True, kw_only=True):
    """Where the code of one job stands."""

    # The id of the job, and the name of its task; '' for the main task of the worker.
    job: str = ""
    task: str = ""
    # `trio`, `asyncio`, `thread` or `boxed`; `worker` for the main task of the worker.
    kind: str
    # The Trio task that the job has started and that stands there; '' for the job's own.
    child: str = ""
    # As in a traceback: the innermost function comes last.
    lines: list[str] = []
    # Why there are no lines, or what was cut.
    note: str = ""


class WorkerStacks(msgspec.Struct, frozen=True, kw_only=True):
    """Where the code of a worker stands: the answer to the command `stack`."""

    stacks: list[JobStack]
    # What was left out; '' for nothing.
    note: str = ""


class ReadStack(NamedTuple):
    """A stack as it was read, not formatted yet. The outermost place comes first."""

    job: str
    task: str
    kind: str
    places: tuple[StackPlace, ...] = ()
    child: str = ""
    note: str = ""


def read_job_stacks(job: str, task: str, kind: str, running_job: RunningJob) -> list[ReadStack]:
    """Return the stack of a running job, then those of the Trio tasks that it has started.

    To be called in the event loop, where all its Trio tasks wait.

    Args:
        job: The id of the job.
        task: The name of its task.
        kind: How its task is run: `trio`, `asyncio`, `thread` or `boxed`.
        running_job: The job.
    """
    if kind == "boxed":
        return [ReadStack(job, task, kind, note=_IN_BOX)]
    if kind == "trio" and running_job.executor_task is not None:
        places = _read_places(_skip_runner(list(walk_awaited(running_job.executor_task.coro))))
        own = ReadStack(job, task, kind, places)
        return [own, *_read_children(own, running_job.executor_task)]
    thread = running_job.job_thread
    places = () if thread is None else _read_places(_walk_job_thread(thread))
    return [ReadStack(job, task, kind, places, note="" if places else _NOT_IN_FUNCTION)]


def read_main_stack() -> ReadStack:
    """Return the stack of the main task of this Trio run."""
    root = trio.lowlevel.current_root_task()
    nurseries = [] if root is None else root.child_nurseries
    main = next(iter(nurseries[-1].child_tasks), None) if nurseries else None
    return ReadStack("", "", "worker", () if main is None else _read_places(walk_awaited(main.coro)))


def walk_awaited(coroutine: Any) -> Iterator[FrameType]:
    """Yield the frames of a coroutine that waits and of all that it awaits or drives, the outermost first."""
    awaited = coroutine
    for _ in range(MAX_WALK):
        frame = _get_frame(awaited)
        if frame is not None:
            yield frame
        awaited = _find_driven_coroutine(frame) or on_trio.get_awaited(awaited)
        if awaited is None:
            return


def walk_outwards(frame: FrameType | None, limit: int = MAX_WALK) -> Iterator[FrameType]:
    """Yield a frame and its callers, the innermost first, at most `limit`."""
    for _ in range(limit):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def get_thread_frame(thread: int | None) -> FrameType | None:
    """Return the innermost frame of a thread; None if it has ended."""
    return None if thread is None else cast("Any", sys)._current_frames().get(thread)


def format_stacks(stacks: Sequence[ReadStack], left_out: int = 0) -> WorkerStacks:
    """Return stacks with their lines of source, in at most `MAX_SIZE` bytes of JSON.

    Where they do not fit, the outermost frames are left out, then the last stacks. To be called in a thread.

    Args:
        stacks: The stacks.
        left_out: How many more there are.
    """
    formatted = [(stack, _format_places(stack.places)) for stack in stacks]
    frames = MAX_FRAMES
    while True:
        answer = [_keep_frames(stack, parts, frames) for stack, parts in formatted]
        size = len(msgspec.json.encode(answer))
        if size <= MAX_SIZE - 200 or frames == 1:  # 200: for the note
            break
        frames //= 2
    while len(msgspec.json.encode(answer)) > MAX_SIZE - 200:
        kept = len(answer) * 3 // 4
        left_out += len(answer) - kept
        del answer[kept:]
    note = (
        f"{format_count(left_out, 'more stack does', 'more stacks do')} not fit: ask for those of one job"
        if left_out
        else ""
    )
    return WorkerStacks(stacks=answer, note=note)


def _get_frame(awaited: Any) -> FrameType | None:
    for name in ("cr_frame", "gi_frame", "ag_frame"):
        if hasattr(awaited, name):
            frame: FrameType | None = getattr(awaited, name)
            return frame
    return None


def _find_driven_coroutine(frame: FrameType | None) -> Coroutine[Any, Any, Any] | None:
    """Return the job's coroutine if a frame is one that drives it: it is not among what the frame awaits."""
    if frame is None or (frame.f_code.co_filename, frame.f_code.co_name) not in _DRIVERS:
        return None
    return frame.f_locals.get("coroutine")


def _skip_runner(frames: list[FrameType]) -> list[FrameType]:
    """Return the frames of the job's own function and what it awaits; all of them where it does not run."""
    starts = [number for number, frame in enumerate(frames, 1) if frame.f_code.co_filename in _RUNNER_FILES]
    return frames[starts[-1] if starts else 0 :] or frames


def _walk_job_thread(thread: JobThread) -> Iterable[FrameType]:
    """Return the frames of a job in a thread, the outermost first."""
    coroutine = thread.coroutine
    if coroutine is not None and not coroutine.cr_running:
        return [frame for frame in walk_awaited(coroutine) if frame.f_code.co_filename not in _RUNNER_FILES]
    found: list[FrameType] = []
    thread_id = thread.thread_id
    for frame in walk_outwards(get_thread_frame(thread_id)):
        if frame.f_code.co_filename in _RUNNER_FILES:
            break
        found.append(frame)
    # The thread may have gone on to another job.
    return found[::-1] if thread.thread_id == thread_id else ()


def _read_children(own: ReadStack, executor_task: trio.lowlevel.Task) -> Iterator[ReadStack]:
    """Yield the stacks of the Trio tasks that a job has started; those that are alike once."""
    found: list[trio.lowlevel.Task] = []
    waiting = [executor_task]
    while waiting and len(found) < MAX_CHILDREN:
        children = [child for nursery in waiting.pop().child_nurseries for child in nursery.child_tasks]
        found += children
        waiting += children
    counts = Counter((child.name, _read_places(walk_awaited(child.coro))) for child in found[:MAX_CHILDREN])
    for (name, places), count in counts.items():
        yield own._replace(
            child=name, places=places, note=f"{format_count(count, 'task')} stand here" if count > 1 else ""
        )


def _read_places(frames: Iterable[FrameType]) -> tuple[StackPlace, ...]:
    places = [
        StackPlace(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name) for frame in frames
    ]
    return tuple(places)


def _format_places(places: tuple[StackPlace, ...]) -> list[str]:
    """Return a text for each place, the outermost first; a line that repeats itself is counted."""
    summaries = [
        traceback.FrameSummary(
            place.file,
            place.line,
            place.function,
            line=mask_lines(linecache.getline(place.file, place.line).strip()[:MAX_SOURCE]),
        )
        for place in places
    ]
    return traceback.StackSummary.from_list(summaries).format()


def _keep_frames(stack: ReadStack, parts: list[str], frames: int) -> JobStack:
    """Return a stack with its innermost frames, and a word on those that are left out."""
    cut = len(parts) - frames
    lines = format_count(len(parts), "line")
    notes = [
        stack.note,
        f"the outermost {cut} of {lines} of the stack {choose_form(cut, 'is', 'are')} left out"
        if cut > 0
        else "",
    ]
    return JobStack(
        job=stack.job,
        task=stack.task,
        kind=stack.kind,
        child=stack.child[:MAX_SOURCE],
        lines=[line[2:] for part in parts[-frames:] for line in part.rstrip("\n").split("\n")],
        note="; ".join(filter(None, notes)),
    )
