"""Frozen: who holds the interpreter's lock, and when a worker whose interpreter does not run must be ended."""

import inspect
import math
import threading

import pytest

from celery5.protocol.process.frozen import (
    FROZEN_AFTER,
    HARD_LIMIT_MARGIN,
    StopRequest,
    ThreadUse,
    find_end_reason,
    find_lock_holders,
    index_stacks,
    name_slot,
    parse_stacks,
)

WRITTEN = """\
Thread 0x00007f01 (most recent call first):
  File "/lib/re/__init__.py", line 166 in match
  File "/app/tasks.py", line 12 in clean
  File "/celery5/runners/in_thread.py", line 99 in run of slot 7
  File "/lib/threading.py", line ??? in run

Current thread 0x00007f02 (most recent call first):
  File "/lib/threading.py", line 320 in wait

Thread 0x00007f03 [celery5-loop] (most recent call first):
  <no Python frame>
"""


def test_written_stacks_tell_the_slot_and_the_line_of_each_thread() -> None:
    job, current, named = parse_stacks(WRITTEN)
    assert [thread.identity for thread in (job, current, named)] == [0x7F01, 0x7F02, 0x7F03]
    assert [thread.slot for thread in (job, current, named)] == [7, None, None]
    assert (
        job.format_place(["/lib"]) == "/lib/re/__init__.py:166 in match, called at /app/tasks.py:12 in clean"
    )
    assert job.format_place() == "/lib/re/__init__.py:166 in match"
    assert named.format_place() == "an unknown line"


@pytest.mark.parametrize(
    "text", ["", "nonsense", "  File", "Thread 0x", '  File "x", line 1 in y', "\0" * 99]
)
def test_what_is_no_stack_is_ignored(text: str) -> None:
    assert parse_stacks(text) == []


def test_a_function_with_a_slot_in_its_name_is_the_same_function() -> None:
    def where(number: int, *, more: int = 1) -> tuple[int, str]:
        frame = inspect.currentframe()
        assert frame is not None
        return number + more, frame.f_code.co_name

    assert name_slot(where, 12)(1) == (2, "where of slot 12")
    assert where(1) == (2, "where")


@pytest.mark.parametrize(
    ("uses", "holders"),
    [
        pytest.param({1: (0.9, 0), 2: (0.01, 200), 3: (0.0, 0)}, {1}, id="one works, one waits, one sleeps"),
        pytest.param({1: (0.0, 0), 2: (0.01, 150), 3: (0.01, 60)}, {1}, id="one sleeps with the lock"),
        pytest.param({1: (0.0, 0), 2: (0.0, 0), 3: (0.01, 90)}, {1, 2}, id="one of two sleepers has it"),
        pytest.param({1: (0.5, 9), 2: (0.45, 9)}, {1, 2}, id="one of two that work has it"),
        pytest.param({1: (0.15, 3), 2: (0.02, 40)}, {1}, id="a busy machine"),
        pytest.param({}, set[int](), id="nothing is known"),
    ],
)
def test_the_holder_of_the_lock_works_or_sleeps_and_who_waits_for_it_wakes_up(
    uses: dict[int, tuple[float, int]], holders: set[int]
) -> None:
    before = {thread: ThreadUse(5.0, 1000) for thread in (*uses, 99)}
    after = {thread: ThreadUse(5.0 + 2 * cpu, 1000 + 2 * wakes) for thread, (cpu, wakes) in uses.items()}
    assert find_lock_holders(before, after, 2.0) == holders


@pytest.mark.parametrize(
    ("deadline", "asked_at", "insisted", "reason"),
    [
        (math.inf, math.inf, False, ""),
        (100 - HARD_LIMIT_MARGIN, math.inf, False, "the time limit of the job passed 5 s ago"),
        (100.1 - HARD_LIMIT_MARGIN, math.inf, False, ""),
        (math.inf, 90.0, False, "it was asked to stop 10 s ago"),
        (math.inf, 90.1, False, ""),
        (math.inf, 99.0, True, "it was told to stop at once"),
    ],
)
def test_a_frozen_worker_is_ended_past_a_limit_or_the_times_of_a_stop(
    deadline: float, asked_at: float, insisted: bool, reason: str
) -> None:
    stop = StopRequest(asked_at, asked_at, insisted)
    for frozen_for in (0.0, FROZEN_AFTER - 0.1, FROZEN_AFTER, 1000.0):
        found = find_end_reason(
            frozen_for=frozen_for, now=100.0, deadline=deadline, stop=stop, stop_limit=10.0
        )
        assert found == (reason if frozen_for >= FROZEN_AFTER else "")


@pytest.mark.parametrize(
    ("window", "noted", "insisted"),
    [
        (0.0, [(1.0, 1)], False),
        (0.0, [(1.0, 1), (1.0, 1)], True),
        (0.0, [(1.0, 2)], True),
        (0.0, [(1.0, 0), (2.0, 1)], False),
        (0.0, [(1.0, 0), (2.0, 1), (3.0, 0)], False),
        (0.0, [(1.0, 0), (2.0, 1), (3.0, 1)], True),
        (2.0, [(1.0, 3), (2.9, 1)], False),
        (2.0, [(1.0, 1), (3.0, 1)], True),
    ],
)
def test_the_second_signal_insists_and_a_command_is_no_signal(
    window: float, noted: list[tuple[float, int]], insisted: bool
) -> None:
    stop = StopRequest()
    for at, signals in noted:
        stop = stop.note(at, signals, duplicate_window=window)
    assert (stop.asked_at, stop.insisted) == (1.0, insisted)


def test_this_threads_identity_is_the_one_that_stacks_are_written_under() -> None:
    text = f"Thread 0x{threading.get_ident():016x} (most recent call first):\n"
    (stack,) = parse_stacks(text)
    assert stack.identity == threading.get_ident()


def test_a_job_stands_in_its_own_thread_and_not_where_it_was_handed_over() -> None:
    """The loop's thread may be stopped between handing a job over and waiting for it."""
    handed_over = """\
Thread 0x00007f01 (most recent call first):
  File "/app/tasks.py", line 12 in freeze
  File "/celery5/runners/on_asyncio.py", line 99 in run of slot 7

Current thread 0x00007f02 (most recent call first):
  File "/celery5/runners/on_asyncio.py", line 201 in begin
  File "/celery5/services/worker/task_execution.py", line 400 in _run_executor_task of slot 7
"""
    (stack,) = index_stacks(parse_stacks(handed_over)).values()
    assert stack.format_place().startswith("/app/tasks.py:12")
