"""Liveness: a worker that works, sleeps or waits counts as alive; one that was stopped, hangs or is gone does not."""

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.protocol.process.liveness import (
    HUNG_AFTER,
    MIN_CPU_FRACTION,
    Liveness,
    ProcessObservation,
    ProcessSample,
    assess_liveness,
    get_beat_interval,
    get_silence_limit,
    observe_heartbeat,
    parse_start_ticks,
    parse_stat,
)

STAT = "4112 (python3 (a) b) {state} 1 4112 4112 0 -1 4194304 9 0 0 0 {user} {system} 0 0 20 0 3 0 811 1 1"


def test_the_state_and_the_processor_time_are_read_whatever_the_process_is_called() -> None:
    sign = parse_stat(STAT.format(state="S", user=250, system=50), at=7.0, ticks=100)
    assert sign == ProcessSample(7.0, "S", 3.0)


@pytest.mark.parametrize("text", ["", "12 (a) S 1", "nonsense"])
def test_what_is_no_stat_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="too short"):
        parse_stat(text, at=0.0, ticks=100)


def test_when_a_process_was_started_is_read_whatever_it_is_called() -> None:
    assert parse_start_ticks(STAT.format(state="S", user=250, system=50)) == 811
    with pytest.raises(ValueError, match="too short"):
        parse_start_ticks("4112 (python3) S 1 4112 4112 0 -1 4194304 9 0 0 0 1 2 0 0")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")
def test_this_very_process_runs_and_uses_processor_time() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    before = parse_stat(Path("/proc/self/stat").read_text(), at=time.monotonic(), ticks=ticks)
    while (now := time.monotonic()) < before.at + 0.1:
        pass
    sign = parse_stat(Path("/proc/self/stat").read_text(), at=now, ticks=ticks)
    assert sign.state == "R"
    assert (
        assess_liveness(ProcessObservation(before.at, before), ProcessSample(sign.at, "S", sign.cpu_seconds))[
            1
        ]
        is Liveness.WORKING
    )


@pytest.mark.parametrize("state", list("Tt"))
def test_a_stopped_process_is_not_counted_however_busy_it_was(state: str) -> None:
    vigil, life = assess_liveness(
        ProcessObservation(0.0, ProcessSample(0.0, "R", 1.0)), ProcessSample(1.0, state, 2.0)
    )
    assert life is Liveness.STOPPED
    assert not life.is_alive
    assert assess_liveness(vigil, ProcessSample(2.0, "R", 2.0))[1].is_alive  # it goes on


@pytest.mark.parametrize("state", list("ZXx"))
def test_a_process_that_ended_is_gone(state: str) -> None:
    life = assess_liveness(observe_heartbeat(0.0), ProcessSample(0.1, state, 1.0))[1]
    assert life is Liveness.GONE
    assert not life.is_alive


@given(st.lists(st.floats(0.3, 50.0), min_size=1, max_size=40), st.floats(MIN_CPU_FRACTION * 1.1, 8.0))
def test_who_works_counts_as_alive_for_ever(pauses: list[float], cores: float) -> None:
    vigil, at, used = ProcessObservation(0.0, ProcessSample(0.0, "S", 0.0)), 0.0, 0.0
    for pause in pauses:
        at, used = at + pause, used + pause * cores
        vigil, life = assess_liveness(vigil, ProcessSample(at, "S", used))
        assert life is Liveness.WORKING


@given(
    st.lists(st.floats(0.3, 50.0), min_size=1, max_size=40),
    st.sampled_from(["one thread", "a new thread", "threads that have ended"]),
)
def test_a_computing_thread_counts_as_work_beside_waiting_threads(pauses: list[float], by: str) -> None:
    vigil, at, threads = ProcessObservation(0.0), 0.0, dict.fromkeys(range(100), 0.0)
    total = 0.0
    for number, pause in enumerate([0.3, *pauses]):
        at += pause
        threads = {thread: used + pause * 0.002 for thread, used in threads.items()}
        total += pause * 0.2
        if number:
            total += (worked := pause * MIN_CPU_FRACTION * 1.1)
            if by == "one thread":
                threads[7] += worked
            elif by == "a new thread":
                threads[100 + number] = worked
        sample = ProcessSample(at, "S", total, dict(threads))
        vigil, life = assess_liveness(vigil, sample)
        assert life is (Liveness.WORKING if number else Liveness.IDLE)


@given(st.lists(st.floats(0.3, 50.0), min_size=1, max_size=40))
def test_threads_that_only_wait_for_the_lock_are_no_work_however_many(pauses: list[float]) -> None:
    vigil, at = observe_heartbeat(0.0), 0.0
    for number, pause in enumerate(pauses):
        at += pause
        state = "R" if number % 2 else "S"  # it is met while it wakes up, now and then
        sample = ProcessSample(at, state, at * 0.4, dict.fromkeys(range(200), at * 0.002))
        vigil, life = assess_liveness(vigil, sample)
        assert life is (Liveness.HUNG if at >= HUNG_AFTER else Liveness.IDLE)


def test_a_process_that_wants_to_run_and_gets_no_core_counts_as_alive() -> None:
    vigil = observe_heartbeat(0.0)
    for at in range(1, int(2 * HUNG_AFTER)):
        vigil, life = assess_liveness(vigil, ProcessSample(float(at), "R", 0.0, {1: 0.0}))
        assert life is (Liveness.IDLE if at == 1 else Liveness.WORKING)


@given(
    st.lists(st.floats(0.3, 50.0), min_size=1, max_size=40),
    st.sampled_from([None, 0.0, MIN_CPU_FRACTION / 2]),
)
def test_who_neither_speaks_nor_works_counts_as_alive_for_a_while(
    pauses: list[float], cores: float | None
) -> None:
    vigil, at = observe_heartbeat(0.0), 0.0
    for pause in pauses:
        at += pause
        vigil, life = assess_liveness(
            vigil, ProcessSample(at, "" if cores is None else "S", cores and at * cores)
        )
        assert life is (Liveness.HUNG if at >= HUNG_AFTER else Liveness.IDLE)


def test_blocked_interpreter_is_doubted_for_minutes_before_it_ends() -> None:
    assert HUNG_AFTER > 60
    assert assess_liveness(observe_heartbeat(0.0), ProcessSample(60.0, "S", 0.0))[1].is_alive


def test_one_word_ends_the_doubt() -> None:
    vigil, life = assess_liveness(observe_heartbeat(0.0), ProcessSample(HUNG_AFTER + 1, "S", 0.0))
    assert life is Liveness.HUNG
    assert (
        assess_liveness(observe_heartbeat(HUNG_AFTER + 2), ProcessSample(HUNG_AFTER + 3, "S", 0.0))[1]
        is Liveness.IDLE
    )
    assert (
        assess_liveness(vigil, ProcessSample(HUNG_AFTER + 3, "S", 2.0))[1] is Liveness.WORKING
    )  # and so does work


def test_silent_member_is_given_up_after_hung_after() -> None:
    for hung_after in (0.5, 10.0, 20.0, 60.0, 600.0):
        silent = get_silence_limit(hung_after)
        for told in (hung_after, silent):  # what a member is told: by the Foreman, and by systemd
            assert silent - get_beat_interval(told) >= hung_after
            assert get_beat_interval(told) <= min(2.0, hung_after / 10)
    assert get_silence_limit(0) == 0
