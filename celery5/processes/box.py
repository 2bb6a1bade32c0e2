"""The process of a Python box: `python -m celery5.processes.box`, started by a worker.

The main thread reads the worker's frames and runs one job after another (`runners/boxes/in_box.py`). While a job takes
long, another thread reads them: to wake one for each job would take as long as a short job. The process ends when the
worker closes its end of the pipe. If that happens during a job, the worker is dead: the process kills itself and
everything that the job has started.
"""

import contextlib
import faulthandler
import importlib
import io
import os
import queue
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

from celery5.app import DEFAULT_APP, App, default_app
from celery5.errors import BadArguments, CeleryError
from celery5.logs.stdlib_log import captured_logging
from celery5.middleware.django_connections import guard_event_loop, set_up_django
from celery5.processes.box_django import BoxSettings
from celery5.protocol.boxes.frames import (
    VERSION,
    BoxEliotMessage,
    BoxHello,
    BoxHome,
    BoxLogLine,
    BoxProgress,
    BoxReady,
    CancelJob,
    FromBox,
    RunJob,
    SoftLimitReached,
    ToBox,
    decode_to_box,
    encode_frame,
    to_box_reply,
)
from celery5.protocol.job.messages import Failure
from celery5.protocol.job.progress import ProgressReport
from celery5.protocol.job.verdict import Outcome, PermanentFailure, Reason
from celery5.runners.boxes.in_box import BoxMainThread
from celery5.runners.boxes.launcher import die_with_parent
from celery5.runners.context import CurrentJob
from celery5.runners.open_resources import RESOURCES, BoxResources
from celery5.runners.outcome import make_failure
from celery5.runners.surrounding import CALL_SURROUND
from celery5.tasks.task import Task

NAME = "celery5-box"
READ_SIZE = 64 * 1024
"""Bytes that are read at once: what a pipe holds."""
MAX_TEXT = 50_000
"""Characters of a text that are sent for the log."""


class BoxPipes:
    """The two pipes to the worker. User code has others: its stdin is empty, and what it prints goes to stderr."""

    def __init__(self) -> None:
        self.incoming = os.dup(0)
        self._out = os.dup(1)
        self._lock = threading.Lock()
        self.defer_errors: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        devnull = os.open(os.devnull, os.O_RDONLY)
        os.dup2(devnull, 0)
        os.close(devnull)
        os.dup2(2, 1)
        stdout: object = sys.stdout
        if isinstance(stdout, io.TextIOWrapper):
            cast("io.TextIOWrapper[Any]", stdout).reconfigure(line_buffering=True)

    def send(self, frame: FromBox) -> None:
        """Write one frame. Ends the process if the worker is gone. Call it in any thread."""
        remaining = memoryview(encode_frame(frame))
        try:
            with self.defer_errors(), self._lock:
                while remaining:
                    remaining = remaining[os.write(self._out, remaining) :]
        except OSError:
            _kill_group()

    def send_event(self, event: str, level: Any, /, **fields: Any) -> None:
        """Send an event of celery5 to the worker's log."""
        self._send_line(BoxLogLine(level=level, event=event, fields=_make_jsonable(fields)))

    def send_log_record(self, message: dict[str, Any]) -> None:
        """Send a record of Python's own log to the worker's log."""
        text, logger, level = (str(message.pop(name, "")) for name in ("message", "logger", "level"))
        message.pop("message_type", None)
        fields = _make_jsonable(message)
        self._send_line(
            BoxLogLine(message=_cut(text), level=cast("Any", level), logger=logger[:MAX_TEXT], fields=fields)
        )

    def send_eliot_message(self, message: dict[str, Any]) -> None:
        """Send a message of eliot to the worker's log. Eliot calls this, in any thread."""
        with contextlib.suppress(LookupError, TypeError, ValueError):
            self.send(BoxEliotMessage({**_make_jsonable(message), "task_level": message["task_level"]}))

    def _send_line(self, line: BoxLogLine) -> None:
        with contextlib.suppress(TypeError, ValueError):
            self.send(line)


REPORT_INTERVAL = 1.0
"""Seconds between two reports of progress that are sent to the worker."""


class BoxReports:
    """Sends what jobs report of their progress to the worker, in a thread that the first report starts."""

    def __init__(self, pipes: BoxPipes) -> None:
        self._pipes = pipes
        self._latest: BoxProgress | None = None
        self._wakeups = queue.SimpleQueue[None]()
        self._thread: threading.Thread | None = None
        self._is_awake = False

    def receive(self, job: CurrentJob, report: ProgressReport) -> None:
        """Keep a report until it is sent, or until there is a later one. Call it in any thread."""
        done, total, note = report
        # No error is raised in the middle of this: after half of it no report would be sent any more.
        with self._pipes.defer_errors():
            self._latest = BoxProgress(done, total, note, job.id)
            if not self._is_awake:
                self._is_awake = True
                self._wakeups.put(None)
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_reports, name=NAME, daemon=True)
                self._thread.start()

    def _send_reports(self) -> None:
        while True:
            self._wakeups.get()
            self._is_awake = False  # before the report is taken: a later one wakes this thread again
            frame, self._latest = self._latest, None
            if frame is not None:
                self._pipes.send(frame)
            time.sleep(REPORT_INTERVAL)


def main() -> None:
    """Run jobs until the worker ends the box."""
    die_with_parent(int(sys.argv[1]))
    # Terminated by a signal, it writes its traceback.
    faulthandler.register(signal.SIGTERM, file=2, all_threads=False, chain=True)
    pipes = BoxPipes()
    frames = BoxFrames(pipes.incoming)
    hello = frames.take()
    if not isinstance(hello, BoxHello) or hello.python is None:
        sys.exit("a box is started by a worker of celery5, which says hello")
    app = _load_app(hello.python)
    CALL_SURROUND.set(app.middleware.make_surround(is_boxed=True))
    guard_event_loop(app.middleware)
    resources = BoxResources()
    RESOURCES.set(resources)
    main_thread = BoxMainThread(pipes.send_event, BoxReports(pipes).receive)
    pipes.defer_errors = main_thread.defer_errors
    pipes.send(BoxReady(VERSION, ("soft-limit", "cancel")))
    with captured_logging(pipes.send_log_record, "info"):
        for run in iter(partial(frames.take_run, main_thread), None):
            with continued_in_eliot(run, pipes.send_eliot_message):
                outcome = _run(app, main_thread, run)
            main_thread.end_job()
            with contextlib.suppress(Exception):  # a stream of the user's own
                sys.stdout.flush()
            pipes.send(to_box_reply(outcome, run.id))
        resources.close()


WATCH_INTERVAL = 0.01
"""Seconds between two looks whether a job takes long."""
IDLE_LOOKS = 100
"""Looks without a job after which the next job must wake the thread that looks."""


class BoxFrames:
    """The worker's frames: read by the main thread between jobs, and by a thread of its own while a job takes long."""

    def __init__(self, incoming: int) -> None:
        self._incoming = incoming
        self._start = b""  # of a line that has not ended
        self._lines = deque[bytes]()
        self._has_ended = False
        self._lock = threading.Lock()  # of who reads
        self._run_count = 0
        self._watcher: threading.Thread | None = None
        self._wakeups = queue.SimpleQueue[None]()
        self._is_asleep = False

    def take(self) -> ToBox | None:
        """Return the next frame; None for one that is unknown, and at the end."""
        while not self._lines and not self._has_ended:
            self._read()
        return decode_to_box(self._lines.popleft()) if self._lines else None

    def take_run(self, main_thread: BoxMainThread) -> RunJob | None:
        """Wait for the next job, and return it; None at the end."""
        with self._lock:
            while self._lines or not self._has_ended:
                frame = self.take()
                if isinstance(frame, RunJob):
                    main_thread.start_job(frame.id)
                    self._hand_over(main_thread)
                    self._run_count += 1
                    self._wake_watcher(main_thread)
                    return frame
        return None

    def _read(self) -> None:
        """Read what there is, and wait until there is something."""
        pieces = [self._start]
        while True:
            chunk = os.read(self._incoming, READ_SIZE)
            pieces.append(chunk)
            if not chunk or b"\n" in chunk:
                break
        *lines, self._start = b"".join(pieces).split(b"\n")
        self._lines.extend(lines)
        self._has_ended = not chunk

    def _hand_over(self, main_thread: BoxMainThread) -> None:
        """Pass on what has come for the job that runs."""
        while self._lines:
            frame = decode_to_box(self._lines.popleft())
            if isinstance(frame, SoftLimitReached | CancelJob):
                main_thread.on_message(frame)

    # ---- while a job takes long

    def _wake_watcher(self, main_thread: BoxMainThread) -> None:
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, args=(main_thread,), name=NAME, daemon=True)
            self._watcher.start()
        elif self._is_asleep:
            self._is_asleep = False
            self._wakeups.put(None)

    def _watch(self, main_thread: BoxMainThread) -> None:
        watched = idle_looks = 0
        while not self._has_ended:
            time.sleep(WATCH_INTERVAL)
            run = self._run_count
            if not main_thread.is_busy:
                idle_looks += 1
            elif run == watched:
                self._watch_job(main_thread, run)
            else:
                watched, idle_looks = run, 0
            if idle_looks > IDLE_LOOKS:
                self._is_asleep = True
                if not main_thread.is_busy:  # else it has begun just now
                    self._wakeups.get()
                idle_looks = 0

    def _watch_job(self, main_thread: BoxMainThread, run: int) -> None:
        """Pass on what comes for a job until it has ended."""
        while main_thread.is_busy and run == self._run_count and not self._has_ended:
            select.select([self._incoming], [], [])
            with self._lock:  # the main thread has it while no job runs
                if run == self._run_count and main_thread.is_busy:
                    self._read()
                    self._hand_over(main_thread)
                    if self._has_ended:
                        _kill_group()


def _kill_group() -> None:
    """Kill this process and everything that the job has started: the worker is gone."""
    os.killpg(0, signal.SIGKILL)


def _load_app(home: BoxHome) -> App:
    """Import and configure the worker's application. Exits if there is none of that name."""
    sys.path[:] = [*home.path, *(path for path in sys.path if path not in home.path)]
    settings = BoxSettings(home.django)
    set_up_django(settings.configure)
    importlib.import_module(home.module)
    settings.configure()  # the module may have set Django up
    app = next(_find_apps(home), None)
    if app is None:
        sys.exit(
            f"module {home.module!r} has no application {home.app!r} when a box imports it: make it at the top of a "
            "module"
        )
    app.module = home.module
    app.configure(**home.settings)
    app.load()
    return app


def _find_apps(home: BoxHome) -> Iterator[App]:
    for module in (sys.modules[home.module], *list(sys.modules.values())):
        yield from (
            value
            for value in list(vars(module).values())
            if isinstance(value, App) and value.name == home.app
        )
    if home.app == DEFAULT_APP:
        yield default_app().choose()


def continued_in_eliot(
    run: RunJob, send: Callable[[dict[str, Any]], None]
) -> contextlib.AbstractContextManager[None]:
    """Run a job inside its eliot action, where the application uses eliot: others do not wait for its import."""
    if not run.eliot or "eliot" not in sys.modules:
        return contextlib.nullcontext()
    from celery5.logs.eliot_context import continued

    return continued(run.eliot, run.id, run.attempt, send)


def _run(app: App, main_thread: BoxMainThread, run: RunJob) -> Outcome:
    """Run one job and return its outcome."""
    if run.task not in app.tasks:
        message = (
            f"no task {run.task!r} in its box: is it declared when the box imports module {app.module!r}?"
        )
        return PermanentFailure(Reason.UNKNOWN_TASK, Failure(type="UnknownTask", message=message))
    task: Task[Any, Any] = app.tasks[run.task]
    try:
        args, kwargs = task.parameters.decode(run.args, run.kwargs)
    except BadArguments as error:
        return PermanentFailure(Reason.BAD_ARGUMENTS, Failure(type="BadArguments", message=str(error)))
    except BaseException as error:  # the user's code: __post_init__, a validator
        return PermanentFailure(Reason.BAD_ARGUMENTS, make_failure(error))
    function = task.deduplicate if run.policy and task.deduplicate is not None else task.function
    return main_thread.run_job(run, task.loop, function, args, kwargs)


def _make_jsonable(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with each value that JSON lacks as text, and long texts cut."""
    return {name: _make_plain(value) for name, value in fields.items()}


def _make_plain(value: object) -> object:
    if value is None or isinstance(value, int | float):
        return value
    return _cut(str.__str__(value) if isinstance(value, str) else repr(value))


def _cut(text: str) -> str:
    """Return a text for the log: the worker takes a longer line of the log for no line of the log."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text)} characters)"


if __name__ == "__main__":
    try:
        main()
    except CeleryError as error:
        sys.exit(str(error))
