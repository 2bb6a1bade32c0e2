"""Nemesis: random faults against a real cluster, what must be true of it afterwards, and that its judge finds faults.

By hand, with other seeds and for longer: `python -m tests.faults.nemesis --seed 7 --seconds 120`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.nemesis import verdict
from tests.faults.nemesis.application import RATE
from tests.faults.nemesis.run import LEASE, run
from tests.faults.nemesis.schedule import KINDS, schedule
from tests.faults.nemesis.verdict import (
    STEPS,
    Life,
    Output,
    Record,
    Run,
    Sent,
    Struck,
    runs_of,
    violations,
)
from tests.night import NIGHTLY

SECONDS = 22.0
"""For which faults strike in each run."""
NIGHTLY_SEEDS = (12, 1, 173)
"""Together they have each kind of fault."""
SEEDS = NIGHTLY_SEEDS if NIGHTLY else NIGHTLY_SEEDS[:1]
"""Those of this run: by default the one with the most kinds of faults."""
RUNS = [(seed, False) for seed in SEEDS] + [(seed, True) for seed in SEEDS if NIGHTLY]
"""Over TLS, for users of least privilege, at night only."""


@pytest.mark.nemesis
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("seed", "tls"), RUNS)
def test_random_faults_lose_and_double_nothing_and_exceed_no_limit(
    seed: int, tls: bool, tmp_path: Path, server_binary: str | None
) -> None:
    outcome = run(seed, SECONDS, tmp_path, binary=server_binary, tls=tls)
    assert not outcome.wrong, f"\n{outcome}"


def test_seeds_have_each_kind_of_fault_and_the_first_nearly_all() -> None:
    struck = [{fault.kind for fault in schedule(seed, SECONDS, lease=LEASE)} for seed in NIGHTLY_SEEDS]
    assert set().union(*struck) == set(KINDS)
    assert len(struck[0]) >= len(KINDS) - 1


def test_a_schedule_follows_from_its_seed_alone_and_is_over_in_time() -> None:
    for seed in range(50):
        faults = schedule(seed, 60.0, lease=LEASE)
        assert faults == schedule(seed, 60.0, lease=LEASE)
        assert faults != schedule(seed + 1, 60.0, lease=LEASE)
        assert all(fault.at + fault.seconds <= 60.0 for fault in faults)
        assert all(fault.target in KINDS[fault.kind].targets for fault in faults)


# ---- the judge: each fault in a history that has nothing else wrong


def good() -> Record:
    """A record of two workers and one job that ran on the first."""
    record = Record(LEASE, stopping=100.0)
    record.lives = [Life("W0", 10, 0.0, ready=True), Life("W1", 11, 0.0, ready=True)]
    record.sent = [Sent("plain:1", "plain", "accepted", "a")]
    record.runs = [Run("plain:1", "a", 1, 10, 1.0, 2.0, True), Run("tick", "t1", 1, 10, 3.0, 3.1, True)]
    record.states = {"a": "SUCCESS"}
    record.fire_times = ["t0", "t1", "t2", "t3"]
    record.sent.append(Sent("run-6", "run", "accepted", states=frozenset({"FAILED"})))
    record.run_states = {"run-6": "FAILED"}
    steps = (*STEPS, "second/undo", "first/undo")
    record.runs += [
        Run(f"run-6/{step}", f"r~{at}", 1, 11, at, at + 0.5, True) for at, step in enumerate(steps, 40)
    ]
    record.sent += [Sent(f"record-{number}/ann", "record", "accepted") for number in (7, 8)]
    record.outputs = [Output("ann", 7, 7), Output("ann", 8, 15)]
    record.sums = {"ann": 15}
    return record


def _lost(record: Record) -> None:
    record.states["a"] = "EXECUTING"


def _published_though_refused(record: Record) -> None:
    record.sent[0] = replace(record.sent[0], outcome="refused", id="")


def _doubled(record: Record) -> None:
    record.runs.append(Run("plain:1", "a", 1, 11, 4.0, 5.0, True))


def _doubled_after_an_outage_of_all(record: Record) -> None:
    _doubled(record)
    record.struck = [Struck("freeze redis", "redis", 0, 1.0, 4.0)]


def _doubled_before_its_worker_was_cut_off(record: Record) -> None:
    _doubled_after_an_outage_of_all(record)
    record.struck.append(Struck("partition", "W0", 10, 5.0, 9.0))


def _doubled_though_cut_off_elsewhere(record: Record) -> None:
    _doubled(record)
    record.struck = [Struck("partition", "W1", 11, 1.0, 9.0)]


def _attempt_used_up(record: Record) -> None:
    record.sent.append(Sent("flaky:2:1", "flaky", "accepted", "b"))
    record.states["b"] = "SUCCESS"
    record.runs += [Run("flaky:2:1", "b", attempt, 10, attempt, attempt + 0.1, True) for attempt in (1, 2, 3)]


def _early(record: Record) -> None:
    record.sent[0] = replace(record.sent[0], not_before=2.0)


def _revoked_and_ran(record: Record) -> None:
    record.sent[0] = replace(record.sent[0], revoked=True)


def _limit_exceeded(record: Record) -> None:
    record.runs += [Run("one:3", "c", 1, 10, 5.0, 7.0, True), Run("one:4", "d", 1, 11, 6.0, 8.0, True)]


def _limit_exceeded_by_one_that_is_cut_off(record: Record) -> None:
    _limit_exceeded(record)
    record.struck = [Struck("partition", "W0", 10, 4.0, 9.0)]


def _rate_exceeded(record: Record) -> None:
    record.runs += [Run(f"paced:{n}", f"p{n}", 1, 10, 5 + n / 100, 6.0, True) for n in range(RATE + 1)]


def _event_missed(record: Record) -> None:
    record.sent.append(Sent("event-5", "event", "accepted"))
    record.runs.append(Run("event-5/smell", "e", 1, 10, 5.0, 5.1, True))


def _event_twice(record: Record) -> None:
    _event_missed(record)
    record.runs += [Run("event-5/taste", job, 1, 10, 5.0, 5.1, True) for job in ("f", "g")]


def _fire_time_missed(record: Record) -> None:
    record.runs.append(Run("tick", "t3", 1, 10, 5.0, 5.1, True))


def _run_not_ended(record: Record) -> None:
    record.sent[1] = replace(record.sent[1], states=frozenset({"SUCCESS"}))


def _step_lost(record: Record) -> None:
    record.runs = [run for run in record.runs if run.label != "run-6/3"]


def _step_by_two_jobs(record: Record) -> None:
    record.runs.append(Run("run-6/3", "r~77", 1, 11, 60.0, 61.0, True))


def _not_undone(record: Record) -> None:
    del record.runs[-1]


def _undone_though_it_succeeded(record: Record) -> None:
    del record.runs[-1]
    record.run_states["run-6"] = "SUCCESS"
    record.sent[1] = replace(record.sent[1], states=frozenset({"SUCCESS"}))


def _record_lost(record: Record) -> None:
    record.sent.append(Sent("record-9/ann", "record", "accepted"))


def _record_twice(record: Record) -> None:
    record.outputs = [Output("ann", 7, 7), Output("ann", 8, 15), Output("ann", 8, 23)]
    record.sums["ann"] = 23
    record.sent.pop()
    record.sent.append(Sent("record-8/ann", "record", "maybe"))


def _record_though_refused(record: Record) -> None:
    record.sent[-1] = replace(record.sent[-1], outcome="refused")


def _records_out_of_order(record: Record) -> None:
    record.outputs = [Output("ann", 8, 8), Output("ann", 7, 15)]


def _sum_of_an_output(record: Record) -> None:
    record.outputs[1] = Output("ann", 8, 16)


def _sum_in_the_end(record: Record) -> None:
    record.sums["ann"] = 22


def _ended_by_itself(record: Record) -> None:
    record.lives[0] = replace(record.lives[0], ended=50.0, code=1)


def _stopped_badly(record: Record) -> None:
    record.lives[0] = replace(record.lives[0], ended=101.0, code=1)


FAULTS: dict[str, Callable[[Record], None]] = {
    "lost": _lost,
    "maybe_done": _published_though_refused,
    "double": _doubled,
    "double ": _doubled_after_an_outage_of_all,
    "double  ": _doubled_though_cut_off_elsewhere,
    "double   ": _doubled_before_its_worker_was_cut_off,
    "attempts": _attempt_used_up,
    "early": _early,
    "revoked": _revoked_and_ran,
    "limit": _limit_exceeded,
    "limit ": _limit_exceeded_by_one_that_is_cut_off,
    "rate": _rate_exceeded,
    "event": _event_missed,
    "event ": _event_twice,
    "fire times": _fire_time_missed,
    "run": _run_not_ended,
    "run ": _step_lost,
    "run  ": _step_by_two_jobs,
    "run   ": _not_undone,
    "run    ": _undone_though_it_succeeded,
    "record": _record_lost,
    "record ": _record_twice,
    "record  ": _record_though_refused,
    "record   ": _records_out_of_order,
    "record    ": _sum_of_an_output,
    "record     ": _sum_in_the_end,
    "process": _ended_by_itself,
    "stop": _stopped_badly,
}


def test_a_run_with_nothing_wrong_is_found_to_be_so() -> None:
    assert violations(good()) == []


@pytest.mark.parametrize("name", FAULTS)
def test_each_thing_that_is_wrong_is_found(name: str) -> None:
    record = good()
    FAULTS[name](record)
    [found] = violations(record)
    assert found.startswith(f"{name.strip()}: ")
    assert record.excuses == []


def _killed(record: Record) -> None:
    record.lives[0] = replace(record.lives[0], ended=3.5, code=-9, killed=True)


def _cut_off(record: Record) -> None:
    record.struck = [Struck("partition", "W0", 10, 0.5, 3.9)]


def _stopped(record: Record) -> None:
    record.struck = [Struck("stop", "W0", 10, 0.5, 3.9)]


@pytest.mark.parametrize("why", [_killed, _cut_off, _stopped])
def test_second_run_is_excused_when_the_first_worker_was_struck(
    why: Callable[[Record], None],
) -> None:
    record = good()
    _doubled(record)
    why(record)
    assert violations(record) == []
    assert len(record.excuses) == 1


def test_second_run_is_excused_when_its_worker_was_stopped() -> None:
    record = good()
    record.runs[0] = replace(record.runs[0], began=4.0, ended=5.0)
    record.runs.append(Run("plain:1", "a", 1, 11, 6.0, 7.0, True))
    record.struck = [Struck("stop", "W1", 11, 1.0, 5.9)]
    assert violations(record) == []
    assert len(record.excuses) == 1


def test_a_job_with_a_limit_does_not_count_while_its_process_is_stopped() -> None:
    record = good()
    _limit_exceeded(record)
    record.struck = [Struck("stop", "W0", 10, 5.5, 9.0)]
    assert violations(record) == []


def test_a_history_is_read_back_with_runs_that_never_ended() -> None:
    history = "a begin 1 1 j 1.0\na end 1 1 j 2.0\nb begin 1 1 k 3.0\nb begin 2 1 k 4.0\nb stop 2 1 k 5.0\n"
    assert runs_of(history) == [
        Run("a", "j", 1, 1, 1.0, 2.0, True),
        Run("b", "k", 1, 1, 3.0),
        Run("b", "k", 1, 2, 4.0, 5.0, False),
    ]


def test_spans_that_meet_are_one() -> None:
    assert verdict.merged([(5, 6), (0, 1), (1, 3), (2, 2.5)]) == [(0, 3), (5, 6)]
