"""Log structured messages through eliot, into a bounded buffer that a thread writes out.

Each job has one message, inside an action that lasts as long as the process. Nothing is written on the event loop.
Messages that do not fit the buffer are dropped and counted. Only modules of this package import eliot.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Literal, Protocol, Self, TextIO, cast

import eliot
import msgspec

from celery5.logs.eliot_context import JobActions, JobContext, end_action, find_listeners, is_place
from celery5.logs.fence import FENCE, pass_cancellation
from celery5.logs.lines import (
    PROCESS,
    JobLine,
    LineWriter,
    Message,
    describe_action,
    make_dropped_message,
    to_message,
)
from celery5.logs.lost_connections import LostConnections
from celery5.protocol.masking import escape_text, get_error_text, mask_fields, mask_lines
from celery5.protocol.workflows.member_ids import get_run_id
from celery5.runners.context import CurrentJob, get_log_fields

Format = Literal["auto", "json", "console", "journal"]
"""What `--log-format` takes."""
Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error")
MAX_RETRIES = 3
"""How often a message that could not be written is tried again, before it counts as lost."""
MAX_UNWRITTEN = 1000
"""The most messages that are kept because they could not be written."""
FINAL_FLUSH_LIMIT = 1.5
"""Seconds in which the thread writes what is left when the process ends."""

LOOK_INTERVAL = 0.01
"""Seconds between two looks at who else listens to eliot."""

_PROBE = "probe of celery5's log"
"""The type of messages by which a log finds out whether others listen: nobody writes them."""
_RANK: Mapping[str, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_INBOX_EVENTS = "celery5:inbox"
"""Messages come back through the inbox, so those of the inbox are not tried again: it would log them for ever."""


class LogDestination(Protocol):
    """Where messages are written to, in the log's own thread: it may block there, but not without a limit."""

    def write(self, messages: Sequence[Message], /) -> int:
        """Write messages in order; return how many were written. The others are offered again in a moment.

        Raises OSError or ValueError when it is gone and wrote none. If it has a `close()`, that is called at the end.
        """
        ...


class LogCounts(msgspec.Struct, frozen=True):
    """What has become of the messages so far."""

    written: int
    # Dropped because the buffer was full, or because they could not be written.
    lost: int
    # Could not be written, and were given to the retry hook.
    retried: int


class LogWriter:
    """An eliot destination: keeps messages in a bounded buffer, which a thread of its own writes out in batches.

    Args:
        destination: Where messages go: a destination, or a stream for lines; None for stdout.
        line_format: The form of the lines on a stream.
        level: Messages below this level are dropped.
        capacity: The most messages in the buffer.
        process: The name in lines that come before the process has another one.
    """

    def __init__(
        self,
        destination: LogDestination | TextIO | None = None,
        *,
        line_format: Literal["json", "console"] = "json",
        level: Level = "info",
        capacity: int = 20_000,
        process: str = "",
    ) -> None:
        target = sys.stdout if destination is None else destination
        self._destination = (
            LineWriter(cast("TextIO", target), form=line_format)
            if hasattr(target, "isatty")
            else cast("LogDestination", target)
        )
        self._takes_job_lines = (
            isinstance(self._destination, LineWriter) and self._destination.accepts_job_lines
        )
        self._is_only_destination = False
        self._looked_at = 0.0
        self._probed: dict[str, Any] | None = None
        self._min_rank = _RANK[level]
        self._level: Level = level
        self._level_listeners: list[Callable[[Level], None]] = []
        self._buffer: deque[Message | JobLine] = deque()
        self._capacity = capacity
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._counting = threading.Lock()
        self._unreported = self._lost = self._written = self._retried = (
            0  # `_unreported`: lost, and not logged yet
        )
        self._has_warned = False
        self._unwritten: deque[Message] = deque()
        self._retry_services = 0
        self._process = process
        # The name of each part of this process that has a log of its own, by the id of its action: the first one began
        # first, and is what the process is.
        self._workers: dict[str, str] = {}

    @property
    def unreported_losses(self) -> int:
        """Return how many messages were lost and are not logged yet."""
        return self._unreported

    @property
    def counts(self) -> LogCounts:
        """Return what has become of the messages so far."""
        return LogCounts(self._written, self._lost, self._retried)

    @property
    def level(self) -> Level:
        """Return the level from which on messages are taken."""
        return self._level

    def set_level(self, level: Level) -> None:
        """Take messages from this level on. It may be changed at any time."""
        self._level, self._min_rank = level, _RANK[level]
        for listener in self._level_listeners:
            listener(level)

    def set_worker(self, task_uuid: str, worker: str) -> None:
        """Use this name in lines of this action that have none, and in all others if the action was the first."""
        self._workers[task_uuid] = worker

    def forget_worker(self, task_uuid: str) -> None:
        """Forget the name of an action that has ended. The last one stays for lines that follow."""
        if len(self._workers) > 1:
            self._workers.pop(task_uuid, None)

    def _find_worker(self, message: Message) -> str:
        workers = self._workers.copy()  # jobs log in threads
        return workers.get(message.get("task_uuid", "")) or next(iter(workers.values()), self._process)

    def on_level_change(self, listener: Callable[[Level], None]) -> None:
        """Call `listener` with each level that is set from now on."""
        self._level_listeners.append(listener)

    def start_retries(self) -> None:
        """Keep messages that could not be written, for a service that takes them. Without one they are lost."""
        with self._counting:
            self._retry_services += 1

    def stop_retries(self) -> list[Message]:
        """Note that a service ends; return what is left for it when it was the last one."""
        with self._counting:
            self._retry_services -= 1
        return [] if self._retry_services else self.take_unwritten(MAX_UNWRITTEN)

    def take_unwritten(self, count: int) -> list[Message]:
        """Return up to `count` messages that could not be written, oldest first. `requeue` takes them back."""
        with self._counting:
            return [self._unwritten.popleft() for _ in range(min(count, len(self._unwritten)))]

    def __call__(self, message: Message) -> None:
        """Take one message; called by eliot, from any thread."""
        if message.get("message_type") == _PROBE:
            self._probed = message
            return
        if "level" not in message or "message_type" not in message:
            message = describe_action(message)
        if _RANK.get(message["level"], 20) < self._min_rank:
            return
        if "worker" not in message:
            # What user code logs through eliot has its job or partition, as all other lines have it.
            message = {"worker": self._find_worker(message), **get_log_fields(), **message}
        if len(self._buffer) >= self._capacity:
            self.count_lost(1)
        else:
            self._buffer.append(message)

    @property
    def is_only_destination(self) -> bool:
        """Return whether eliot has no other destinations and no global fields, so that it may be passed by."""
        self._looked_at = 0.0
        return self.is_alone(time.time())

    def is_alone(self, at: float) -> bool:
        """Return the same as it was at most 10 ms ago: looking costs 2 µs, and each job asks."""
        if not 0 <= at - self._looked_at < LOOK_INTERVAL:  # the clock may have been set back
            self._looked_at = at
            self._is_only_destination = find_listeners() == [self] and not self._find_global_fields()
        return self._is_only_destination

    def _find_global_fields(self) -> bool:
        """Return whether eliot adds fields to messages: one that nobody but this writer gets tells."""
        self._probed = None
        eliot.Logger().write({"message_type": _PROBE})
        return self._probed is None or len(self._probed) > 1

    def accepts(self, level: Level) -> bool:
        """Return whether messages of this level are taken."""
        return _RANK[level] >= self._min_rank

    def add_job_line(self, line: JobLine) -> None:
        """Take the message of a job without eliot: only when this is its only destination."""
        if len(self._buffer) >= self._capacity:
            self.count_lost(1)
        else:
            self._buffer.append(line)

    def requeue(self, messages: Iterable[Message]) -> int:
        """Take messages back that could not be written; return how many fitted the buffer."""
        taken = 0
        for message in messages:
            if len(self._buffer) >= self._capacity:
                self.count_lost(1)
            else:
                self._buffer.append(message)
                taken += 1
        return taken

    def count_lost(self, count: int) -> None:
        """Count this many messages as lost."""
        with self._counting:
            self._unreported += count
            self._lost += count

    def __enter__(self) -> Self:
        """Install it for this process."""
        eliot.add_destinations(self)
        self._looked_at = 0.0
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        """Remove it from this process and write what is left."""
        eliot.remove_destination(self)
        self.stop()

    def start(self) -> None:
        """Start the thread that writes."""
        self._stop.clear()
        self._thread = threading.Thread(target=self._keep_writing, name="celery5-log", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write what is left, and end the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2.0)

    def _keep_writing(self) -> None:
        while not self._stop.wait(0.05):
            self._flush()
        limit = time.monotonic() + FINAL_FLUSH_LIMIT
        while self._flush() and time.monotonic() < limit:
            time.sleep(0.01)
        if self._buffer:
            self.report_lost(len(self._buffer), "the log was not read")
        close = getattr(self._destination, "close", None)
        if callable(close):  # in this thread: a journal that is closed during a write opens a new socket
            close()

    def _flush(self) -> bool:
        """Write what there is, 256 messages at a time; return whether the destination is too busy for all of it.

        A destination that fails costs messages, never the process.
        """
        while self._buffer or self._unreported:
            batch = [self._buffer.popleft() for _ in range(min(256, len(self._buffer)))]
            is_ready = self._takes_job_lines
            messages = cast("list[Message]", batch) if is_ready else [to_message(line) for line in batch]
            with self._counting:
                unreported, self._unreported = self._unreported, 0
            try:
                done = self._destination.write(
                    [*messages, make_dropped_message(unreported, self._find_worker({}))]
                    if unreported
                    else messages
                )
            except BaseException as error:  # the destination may be the user's own
                with self._counting:
                    self._unreported += unreported
                self._retry([to_message(line) for line in batch], error)
                return False
            self._written += min(done, len(batch))
            if done < len(batch) + bool(unreported):
                with self._counting:
                    self._unreported += unreported
                self._buffer.extendleft(reversed(batch[done:]))
                return True
        return False

    def _retry(self, batch: list[Message], error: BaseException) -> None:
        """Keep those messages that may be tried again; the others are lost."""
        messages = [
            message
            for message in batch
            if message.get("again", 0) < MAX_RETRIES
            and not str(message.get("message_type")).startswith(_INBOX_EVENTS)
        ]
        with self._counting:
            kept = messages[: MAX_UNWRITTEN - len(self._unwritten)] if self._retry_services else []
            self._unwritten.extend(kept)
        self._retried += len(kept)
        if len(kept) < len(batch):
            self.report_lost(len(batch) - len(kept), f"{type(error).__name__}: {error}")

    def report_lost(self, count: int, why: str) -> None:
        """Count lost messages; the first time write a line to stderr, the one place that is left."""
        self.count_lost(count)
        if not self._has_warned:
            self._has_warned = True
            with suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(
                    f"celery5: log messages are lost and counted from here on: {escape_text(why)}\n"
                )
                sys.stderr.flush()


class Log:
    """The log of one process: all messages are inside one eliot action, which names the process.

    Args:
        kind: `worker`, `router`, `scheduler` and so on.
        writer: What writes the messages; None where the application has its own eliot destinations.
    """

    def __init__(
        self, *, worker: str, app: str, writer: LogWriter | None = None, kind: str = "worker"
    ) -> None:
        self.writer = writer
        self.lost_connections: LostConnections = LostConnections(self.event)
        self._worker = worker
        self._action = eliot.start_action(action_type=PROCESS, process=kind, worker=worker, app=app)
        self._write = self._action.log
        # Jobs are written on a branch of the action that is reserved for them: counting along it costs a third of
        # the action's own bookkeeping.
        self._uuid, _, branch = self._action.serialize_task_id().decode().partition("@")
        self._branch = [int(part) for part in branch.split("/") if part]
        self._jobs = 0
        if writer is not None:
            writer.set_worker(self._uuid, worker)
        self._write_to_eliot = eliot.Logger().write
        self._job_actions = JobActions(self._action, worker)
        # Whether each job has an action from its beginning: something else listens to eliot.
        self.is_shared: bool = self._find_shared(time.time())

    @property
    def worker(self) -> str:
        """The name of the worker in each line."""
        return self._worker

    def set_worker(self, worker: str) -> None:
        """Use this name of the worker from now on: each incarnation has another."""
        self._worker = worker
        if self.writer is not None:
            self.writer.set_worker(self._uuid, worker)

    def event(self, name: str, level: Level = "info", /, **fields: Any) -> None:
        """Log an event of the process, as `celery5:<name>`, without passwords."""
        fields.setdefault("worker", self._worker)
        try:
            self._write(message_type=f"celery5:{name}", level=level, **mask_fields(fields))
        except BaseException as error:  # of a destination of the application's own
            pass_cancellation(error)
            FENCE.count("log")

    def write_message(self, message: dict[str, Any]) -> None:
        """Write a message of eliot that comes from another process, as it is."""
        try:
            self._write_to_eliot(message)
        except BaseException as error:  # of a destination of the application's own
            pass_cancellation(error)
            FENCE.count("log")

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
        """Log that an attempt has ended here.

        It costs a third of `log_job` when there is no `extra`, and eliot has no other destinations than the writer.
        Where the job has an action, this ends it.
        """
        writer, run, at = self.writer, get_run_id(job), time.time()
        self.is_shared = self._find_shared(at)
        action = self._job_actions.take(job, attempt)
        if action is not None or extra is not None or self.is_shared or writer is None:
            fields: dict[str, Any] = {"job": job, "task": task, "queue": queue, "state": state}
            fields |= {"attempt": attempt, "seconds": seconds}
            fields |= {"trace": trace} if trace else {}
            fields |= {"run": run} if run else {}
            fields |= mask_fields(extra) if extra else {}
            if action is None:
                self.log_job(level, **fields)
            else:
                self._end_action(action, level, fields)
        elif writer.accepts(level):
            self._jobs += 1
            place = (*self._branch, self._jobs)
            writer.add_job_line(
                JobLine(
                    job,
                    task,
                    queue,
                    state,
                    attempt,
                    seconds,
                    self._worker,
                    at,
                    level,
                    "celery5:job",
                    self._uuid,
                    place,
                    trace,
                    run,
                )
            )

    def log_job(self, level: Level, **fields: Any) -> None:
        """Log that an attempt has ended here, with these fields."""
        self._jobs += 1
        fields["worker"] = self._worker
        fields["timestamp"] = time.time()
        fields["level"] = level
        fields["message_type"] = "celery5:job"
        fields["task_uuid"] = self._uuid
        fields["task_level"] = [*self._branch, self._jobs]
        try:
            self._write_to_eliot(fields)
        except BaseException as error:  # of a destination of the application's own
            pass_cancellation(error)
            FENCE.count("log")

    def _find_shared(self, at: float) -> bool:
        """Return whether something but celery5's own log listens to eliot."""
        if self.writer is not None:
            return not self.writer.is_alone(at)
        return any(not isinstance(listener, LogWriter) for listener in find_listeners())

    def surround_jobs(self) -> AbstractContextManager[Any]:
        """Have what the code of jobs logs through eliot belong to its job, in this block."""
        return self._job_actions.surround()

    def has_action(self, trace: str) -> bool:
        """Return whether a job has an eliot action: it was sent inside one, or something else listens to eliot."""
        return self.is_shared or (bool(trace) and is_place(trace))

    def begin_job(self, job: CurrentJob) -> None:
        """Begin the action of a job that has one."""
        try:
            self._job_actions.begin(job)
        except BaseException as error:  # of a destination of the application's own
            pass_cancellation(error)
            FENCE.count("log")

    def get_place(self, job: CurrentJob) -> str:
        """Return where another process continues the action of a job."""
        return self._job_actions.get_place(job)

    def _end_action(self, action: eliot.Action, level: Level, fields: Mapping[str, Any]) -> None:
        why = str(fields.get("error", "")) if level in ("warning", "error") else ""
        try:
            end_action(action, {**fields, "worker": self._worker, "level": level}, why)
        except BaseException as error:  # of a destination of the application's own
            pass_cancellation(error)
            FENCE.count("log")

    def finish(self, error: BaseException | None = None) -> None:
        """End the action of the process, with the first error of `error` if there is one."""
        first = error
        while isinstance(first, BaseExceptionGroup):
            first = cast("BaseExceptionGroup[BaseException]", first).exceptions[0]
        self._action.finish(None if first is None else _mask_error(first))
        if self.writer is not None:
            self.writer.forget_worker(self._uuid)


class NullLog(Log):
    """A log that writes nothing, for a process that is built only to check whether it can be."""

    def __init__(self) -> None:
        self.writer: LogWriter | None = None
        self.lost_connections: LostConnections = LostConnections(self.event)
        self._worker = ""
        self.is_shared = False

    def event(self, name: str, level: Level = "info", /, **fields: Any) -> None:
        """Do nothing."""

    def log_job(self, level: Level, **fields: Any) -> None:
        """Do nothing."""

    def begin_job(self, job: CurrentJob) -> None:
        """Do nothing."""

    def surround_jobs(self) -> AbstractContextManager[Any]:
        """Do nothing."""
        return nullcontext()

    def log_job_end(self, level: Level, **fields: Any) -> None:
        """Do nothing."""

    def finish(self, error: BaseException | None = None) -> None:
        """Do nothing."""


def get_eliot_context() -> str:
    """Return the caller's place in its own eliot action, for eliot's `continue_task`; '' outside of any."""
    action = eliot.current_action()
    if action is None:
        return ""
    return action.get_place() if isinstance(action, JobContext) else action.serialize_task_id().decode()


def _mask_error(error: BaseException) -> BaseException:
    """Return an error with the name and the text of this one, which eliot shows, without passwords in the text."""
    text = get_error_text(error)
    masked = mask_lines(text)
    if masked == text:
        return error
    kind = type(error)
    return cast("Exception", type(kind.__name__, (Exception,), {"__module__": kind.__module__})(masked))
