"""Log: structured messages through eliot, to a bounded buffer that a thread writes out.

One completion message for each job inside a worker-long action; never a write on the event loop; what does not fit
the buffer is shed and counted; what cannot be written may be given to somebody who brings it again. No other module
imports eliot.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol, Self, TextIO, cast

import eliot
import msgspec

from celery5.logs.lines import JobLine, LineWriter, Message, make_dropped_message, to_message
from celery5.protocol.masking import escape_text
from celery5.runners.context import CURRENT_JOB

Format = Literal["auto", "json", "console", "journal"]
"""What `--log-format` takes."""
Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error")
MAX_RETRIES = 3
"""How often a message that could not be written is brought again, before it counts as lost (C16)."""
FINAL_FLUSH_LIMIT = 1.5
"""Seconds in which the thread writes what is left when the process ends."""

_RANK: Mapping[str, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_OF_THE_WAY_BACK = "celery5:inbox"
"""What the inbox says is not brought again through the inbox: it would say so again, for ever."""


class LogDestination(Protocol):
    """Where messages are written to, in the log's own thread: it may block there, but not without a limit."""

    def write(self, messages: Sequence[Message], /) -> int:
        """Write messages in order; gives how many it took. What it had no room for is offered again, in a moment.

        Raises OSError or ValueError when it is gone and took none. If it has a `close()`, that is called at the end.
        """
        ...


class LogCounts(msgspec.Struct, frozen=True):
    """What has become of the messages so far: `written`; `lost`, for want of room or because they could not be written;
    and brought `again`."""

    written: int
    lost: int
    again: int


class LogWriter:
    """An eliot destination: keeps messages in a bounded buffer, which a thread of its own writes out in batches.

    `to` is an outlet, or a stream, for lines in the form `form`; without it stdout.
    """

    def __init__(
        self,
        destination: LogDestination | TextIO | None = None,
        *,
        line_format: Literal["json", "console"] = "json",
        level: Level = "info",
        capacity: int = 20_000,
    ) -> None:
        outlet = sys.stdout if destination is None else destination
        self._outlet = (
            LineWriter(cast("TextIO", outlet), form=line_format)
            if hasattr(outlet, "isatty")
            else cast("LogDestination", outlet)
        )
        self._job_lines = isinstance(self._outlet, LineWriter) and self._outlet.accepts_job_lines
        self._listeners: list[object] | None = None
        self._global_fields: Mapping[str, object] = {}
        self._least = _RANK[level]
        self._level: Level = level
        self._followers: list[Callable[[Level], None]] = []
        self._buffer: deque[Message | JobLine] = deque()
        self._capacity = capacity
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._counting = threading.Lock()
        self._shed = self._lost = self._written = self._again = 0
        self._told = False
        self.retry_hook: Callable[[list[Message]], int] | None = None

    @property
    def shed(self) -> int:
        """How many messages were lost and not told of yet."""
        return self._shed

    @property
    def counts(self) -> LogCounts:
        """What has become of the messages so far."""
        return LogCounts(self._written, self._lost, self._again)

    @property
    def level(self) -> Level:
        """From which level on messages are taken. It may be changed at any time."""
        return self._level

    @level.setter
    def level(self, level: Level) -> None:
        self._level, self._least = level, _RANK[level]
        for each in self._followers:
            each(level)

    def on_level_change(self, follow: Callable[[Level], None]) -> None:
        """Have `follow` called with each level that is set from now on."""
        self._followers.append(follow)

    def __call__(self, message: Message) -> None:
        """Take one message; called by eliot, from any thread."""
        if _RANK.get(message.get("level", "info"), 20) < self._least:
            return
        if "worker" not in message:
            message = _whose(message)
        if len(self._buffer) >= self._capacity:
            self.count_lost(1)
        else:
            self._buffer.append(message)

    @property
    def is_only_destination(self) -> bool:
        """Whether nobody else hears what eliot is told, and eliot has nothing to add: then it need not be told."""
        return self._listeners == [self] and not self._global_fields

    def accepts(self, level: Level) -> bool:
        """Whether messages of this level are taken."""
        return _RANK[level] >= self._least

    def add_job_line(self, line: JobLine) -> None:
        """Take what is said of a job, when nobody else listens."""
        if len(self._buffer) >= self._capacity:
            self.count_lost(1)
        else:
            self._buffer.append(line)

    def requeue(self, messages: Iterable[Message]) -> int:
        """Take messages that were given to `bring_again`; gives how many of them there was room for."""
        taken = 0
        for each in messages:
            if len(self._buffer) >= self._capacity:
                self.count_lost(1)
            else:
                self._buffer.append(each)
                taken += 1
        return taken

    def count_lost(self, count: int) -> None:
        """So many messages are lost."""
        with self._counting:
            self._shed += count
            self._lost += count

    def __enter__(self) -> Self:
        """Install it for this process."""
        eliot.add_destinations(self)
        self._listeners, self._global_fields = _in_eliot()
        self._stop.clear()
        self._thread = threading.Thread(target=self._write_on, name="celery5-log", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        """Take it out again and write what is left."""
        eliot.remove_destination(self)
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2.0)

    def _write_on(self) -> None:
        while not self._stop.wait(0.05):
            self._flush()
        limit = time.monotonic() + FINAL_FLUSH_LIMIT
        while self._flush() and time.monotonic() < limit:
            time.sleep(0.01)
        if self._buffer:
            self.report_lost(len(self._buffer), "the log was not read")
        close = getattr(self._outlet, "close", None)
        if callable(
            close
        ):  # here, where it is written to: a journal that is closed while it is would open another line
            close()

    def _flush(self) -> bool:
        """Write what is there, 256 messages at a time; gives whether the outlet is too busy for all of it. One that is
        gone costs messages, never the process."""
        while self._buffer or self._shed:
            batch = [self._buffer.popleft() for _ in range(min(256, len(self._buffer)))]
            said = cast("list[Message]", batch) if self._job_lines else [to_message(each) for each in batch]
            with self._counting:
                shed, self._shed = self._shed, 0
            try:
                done = self._outlet.write([*said, make_dropped_message(shed)] if shed else said)
            except Exception as error:  # the outlet may be the user's own
                with self._counting:
                    self._shed += shed
                self._could_not_write([to_message(each) for each in batch], error)
                return False
            self._written += min(done, len(batch))
            if done < len(batch) + bool(shed):
                with self._counting:
                    self._shed += shed
                self._buffer.extendleft(reversed(batch[done:]))
                return True
        return False

    def _could_not_write(self, batch: list[Message], error: Exception) -> None:
        """Have the messages brought again that may be, and lose the others."""
        again = [
            message
            for message in batch
            if message.get("again", 0) < MAX_RETRIES
            and not str(message.get("message_type")).startswith(_OF_THE_WAY_BACK)
        ]
        bring = self.retry_hook
        taken = bring(again) if bring is not None and again else 0
        self._again += taken
        if taken < len(batch):
            self.report_lost(len(batch) - taken, f"{type(error).__name__}: {error}")

    def report_lost(self, count: int, why: str) -> None:
        """Count what is lost; the first time somebody is told, in the one place that is left."""
        self.count_lost(count)
        if not self._told:
            self._told = True
            with suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(
                    f"celery5: log messages are lost and counted from here on: {escape_text(why)}\n"
                )
                sys.stderr.flush()


class Log:
    """What one process writes: all inside one action, so that every line says which process it is from.

    `kind` says what it is: a worker, a Router, a Scheduler.
    `journal` is what takes it, for those who change its level or bring messages again; None where nobody takes it.
    """

    def __init__(
        self, *, worker: str, app: str, writer: LogWriter | None = None, kind: str = "worker"
    ) -> None:
        self.writer = writer
        self._worker = worker
        self._action = eliot.start_action(action_type=f"celery5:{kind}", worker=worker, app=app)
        self._write = self._action.log
        # Jobs are written on a branch of the action that is reserved for them: counting along it costs a third of
        # the action's own bookkeeping.
        self._uuid, _, branch = self._action.serialize_task_id().decode().partition("@")
        self._branch = [int(part) for part in branch.split("/") if part]
        self._jobs = 0
        self._tell_eliot = eliot.Logger().write

    def set_worker(self, worker: str) -> None:
        """From here on this is the worker's name: each of its incarnations has another."""
        self._worker = worker

    def event(self, name: str, level: Level = "info", /, **fields: Any) -> None:
        """Something happened to the process: `celery5:<name>`."""
        fields.setdefault("worker", self._worker)
        self._write(message_type=f"celery5:{name}", level=level, **fields)

    def log_job_end(
        self,
        level: Level,
        *,
        job: str,
        task: str,
        queue: str,
        state: str,
        attempt: int,
        seconds: float,
        trace: str = "",
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """A job has ended here. The same as `job`; at a third of the cost where there is not `more` to say of it, and
        eliot has no other listeners than the journal."""
        journal = self.writer
        if extra is not None or journal is None or not journal.is_only_destination:
            said = {
                "job": job,
                "task": task,
                "queue": queue,
                "state": state,
                "attempt": attempt,
                "seconds": seconds,
            }
            said |= {"trace": trace} if trace else {}
            self.log_job(level, **said, **(extra or {}))
        elif journal.accepts(level):
            self._jobs += 1
            place = (*self._branch, self._jobs)
            journal.add_job_line(
                JobLine(
                    job,
                    task,
                    queue,
                    state,
                    attempt,
                    seconds,
                    self._worker,
                    time.time(),
                    level,
                    "celery5:job",
                    self._uuid,
                    place,
                    trace,
                )
            )

    def log_job(self, level: Level, **fields: Any) -> None:
        """A job has ended here: the one message of its run."""
        self._jobs += 1
        fields["worker"] = self._worker
        fields["timestamp"] = time.time()
        fields["level"] = level
        fields["message_type"] = "celery5:job"
        fields["task_uuid"] = self._uuid
        fields["task_level"] = [*self._branch, self._jobs]
        self._tell_eliot(fields)

    def finish(self, error: BaseException | None = None) -> None:
        """The process ends, by an `error` if there is one; of a group its first."""
        first = error
        while isinstance(first, BaseExceptionGroup):
            first = cast("BaseExceptionGroup[BaseException]", first).exceptions[0]
        self._action.finish(first)


class NullLog(Log):
    """A log in which nothing is written: for a process that is put together only to see whether it can be."""

    def __init__(self) -> None:
        self.writer = None
        self._worker = ""

    def event(self, name: str, level: Level = "info", /, **fields: Any) -> None:
        """Nothing."""

    def log_job(self, level: Level, **fields: Any) -> None:
        """Nothing."""

    def log_job_end(self, level: Level, **fields: Any) -> None:
        """Nothing."""

    def finish(self, error: BaseException | None = None) -> None:
        """Nothing."""


def get_eliot_context() -> str:
    """Where in an eliot action of the caller's own this is, as eliot writes it to go on with elsewhere; '' outside of
    any (C17)."""
    action = eliot.current_action()
    return "" if action is None else action.serialize_task_id().decode()


def _in_eliot() -> tuple[list[object] | None, Mapping[str, object]]:
    """Who hears what eliot is told, and what it adds to each message, as eliot itself keeps both: they change when the
    application adds something. None for the first where eliot keeps them in another way than we know."""
    kept = getattr(eliot.Logger, "_destinations", None)
    listeners: object = getattr(kept, "_destinations", None)
    fields: object = getattr(kept, "_globalFields", None)
    if not isinstance(listeners, list) or not isinstance(fields, dict):
        return None, {}
    return cast("list[object]", listeners), cast("dict[str, object]", fields)


def _whose(message: Message) -> Message:
    """The message; what user code says through eliot while a job runs has the job, as all other lines do."""
    job = CURRENT_JOB.get()
    if job is None:
        return message
    said: Message = {"job": job.id, "task": job.task, "worker": job.worker}
    return {**said, **({"trace": job.trace} if job.trace else {}), **message}
