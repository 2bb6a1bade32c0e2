"""How a Python box reads the worker's frames: between jobs, and while a job takes long."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from msgspec import Raw

from celery5.processes.box import BoxFrames
from celery5.protocol.boxes.frames import CancelJob, RunJob, SoftLimitReached, encode_frame
from celery5.runners.boxes.in_box import WAKE_SIGNAL, BoxControl, BoxMainThread


class Box:
    """The frames of a box, and the worker's end of the pipe."""

    def __init__(self) -> None:
        self.incoming, self._outgoing = os.pipe()
        self.frames = BoxFrames(self.incoming)
        self.main_thread = BoxMainThread(lambda _name, _level, /, **_: None)

    def send(self, *messages: RunJob | BoxControl) -> None:
        """Send frames in one write."""
        os.write(self._outgoing, b"".join(map(encode_frame, messages)))

    def take(self) -> RunJob | None:
        """Wait for the next job."""
        return self.frames.take_run(self.main_thread)

    @property
    def messages(self) -> list[BoxControl]:
        """What has come for the job."""
        return self.main_thread._early_messages

    def end_job(self) -> None:
        """End the job that was taken."""
        self.main_thread.end_job()

    def end(self) -> None:
        """Close the worker's end."""
        if self._outgoing >= 0:
            os.close(self._outgoing)
        self._outgoing = -1


@pytest.fixture
def box() -> Iterator[Box]:
    """A box without a worker. Its watching thread ends when it has seen the end between two jobs."""
    handler = signal.getsignal(WAKE_SIGNAL)
    box = Box()
    yield box
    signal.signal(WAKE_SIGNAL, handler)
    box.end_job()
    box.end()
    while box.take() is not None:
        box.end_job()
    watcher = box.frames._watcher
    if watcher is not None:
        box.frames._wakeups.put(None)
        watcher.join(10)
    os.close(box.incoming)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_message_reaches_a_job_that_takes_long(box: Box) -> None:
    box.send(RunJob("one", "task"))
    assert box.take() == RunJob("one", "task")

    def is_told(message: BoxControl) -> bool:
        return message in box.messages

    for message in (SoftLimitReached("one", "late"), CancelJob("one")):
        box.send(message)
        wait_for(partial(is_told, message))


def test_a_message_reaches_a_job_after_a_time_without_jobs(box: Box) -> None:
    box.send(RunJob("one", "task"))
    box.take()
    box.end_job()
    wait_for(lambda: box.frames._is_asleep)
    box.send(RunJob("two", "task"))
    box.take()
    box.send(CancelJob("two"))
    wait_for(lambda: bool(box.messages))


def test_a_message_that_comes_with_its_job_is_not_lost(box: Box) -> None:
    box.send(RunJob("one", "task"), CancelJob("one"))
    box.take()
    assert box.messages == [CancelJob("one")]


def test_a_message_for_a_job_that_has_ended_is_not_taken_for_the_next_job(box: Box) -> None:
    box.send(RunJob("one", "task"))
    box.take()
    box.end_job()
    box.send(CancelJob("one"), RunJob("two", "task"))
    assert box.take() == RunJob("two", "task")
    assert box.messages == []


def test_a_large_job_comes_in_many_pieces(box: Box) -> None:
    run = RunJob("one", "task", args=Raw(b'["%s"]' % (b"x" * 1_000_000)))
    frame = memoryview(encode_frame(run))

    def write() -> None:
        sent = 0
        while sent < len(frame):
            sent += os.write(box._outgoing, frame[sent : sent + 100_000])

    writer = threading.Thread(target=write)
    writer.start()
    assert box.take() == run
    writer.join()


def test_the_end_of_the_pipe_between_jobs_ends_the_box(box: Box) -> None:
    box.send(RunJob("one", "task"))
    box.take()
    box.end_job()
    box.end()
    assert box.take() is None
