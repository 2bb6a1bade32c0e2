"""Random faults on a cluster with replicas, and on servers that sentinels watch: primaries die, are cut off and are
changed, and slots move, under load. No job that a replica had is lost, none runs twice without a reason, and jobs run
again in time.

By hand: `python -m tests.faults.nemesis --on cluster --seed 3 --seconds 60`.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.faults.nemesis.run import LEASE, run
from tests.faults.nemesis.schedule import KINDS_ON, SERVERS, schedule
from tests.faults.nemesis.verdict import LAG, Output, Record, Run, Sent, Struck, find_restarts, violations
from tests.faults.worker.test_nemesis import good
from tests.night import NIGHTLY, with_clusters

SECONDS = 60.0 if NIGHTLY else 24.0
"""For which faults strike in each run."""
SEEDS = {"cluster": (5, 23), "sentinel": (37, 12)}
"""By day the first one. In its first seconds are the faults that matter most."""
RUNS = [(on, seed, False) for on, seeds in SEEDS.items() for seed in (seeds if NIGHTLY else seeds[:1])]
RUNS += [(on, seed, True) for on, seed, _ in RUNS if NIGHTLY]
"""Over TLS, for users of least privilege, at night only."""


@pytest.mark.nemesis
@pytest.mark.timeout(400)
@with_clusters("two minutes")
@pytest.mark.parametrize(("on", "seed", "tls"), RUNS)
def test_failovers_under_load_lose_no_job_that_a_replica_had(
    on: str, seed: int, tls: bool, tmp_path: Path, server_binary: str | None
) -> None:
    outcome = run(seed, SECONDS, tmp_path, on=on, binary=server_binary, tls=tls)
    assert not outcome.wrong, f"\n{outcome}"


def test_first_seeds_kill_the_primary_of_the_queue_and_cut_it_off() -> None:
    struck = {
        on: {(fault.kind, fault.target) for fault in schedule(seeds[0], 24, lease=LEASE, kinds=KINDS_ON[on])}
        for on, seeds in SEEDS.items()
    }
    wanted = {("kill primary", "queue"), ("cut off primary", "queue"), ("migrate slot", "queue")}
    assert wanted < struck["cluster"]
    wanted = {("kill primary", "redis"), ("cut off primary", "redis"), ("change primary", "redis")}
    assert wanted < struck["sentinel"]


@pytest.mark.parametrize("on", ["cluster", "sentinel"])
def test_servers_are_whole_again_before_another_fault_strikes_them(on: str) -> None:
    kinds = KINDS_ON[on]
    for seed in range(20):
        faults = [fault for fault in schedule(seed, 60, lease=LEASE, kinds=kinds) if fault.target in SERVERS]
        for before, after in pairwise(faults):
            recovered = before.at + before.seconds + LEASE * kinds[before.kind].recovery
            assert after.at >= round(recovered, 2) - 0.01


# ---- the judge


def failed_over(record: Record, began: float = 1.8) -> None:
    record.struck.append(Struck("kill primary", "queue", 0, began, began + 3))


def test_a_job_that_was_lost_is_found_although_a_primary_died() -> None:
    record = good()
    failed_over(record)
    record.states["a"] = "UNKNOWN"
    [found] = violations(record)
    assert found.startswith("lost: plain:1 ")


@pytest.mark.parametrize(("began", "excused"), [(1.8, True), (2.0 + LAG + 0.1, False)])
def test_a_job_may_run_again_only_if_it_ended_just_before_a_failover(began: float, excused: bool) -> None:
    record = good()
    failed_over(record, began)
    record.runs.append(Run("plain:1", "a", 1, 11, began + 3, began + 4, True))
    assert (violations(record) == []) is excused
    assert len(record.excuses) == excused


@pytest.mark.parametrize(("at", "excused"), [(1.5, True), (50.0, False)])
@pytest.mark.parametrize("kind", ["event", "record", "run"])
def test_what_is_sent_without_waiting_may_be_missing_only_near_a_failover(
    kind: str, at: float, excused: bool
) -> None:
    record = good()
    failed_over(record)
    label = {"event": "event-7", "record": "record-9/ann", "run": "run-8"}[kind]
    record.sent.append(Sent(label, kind, "accepted", at=at))
    assert (violations(record) == []) is excused
    assert bool(record.excuses) is excused


@pytest.mark.parametrize(("at", "excused"), [(1.5, True), (50.0, False)])
def test_a_sum_may_have_an_output_that_a_failover_lost_and_no_other(at: float, excused: bool) -> None:
    record = good()
    failed_over(record)
    record.sent += [Sent(f"record-{n}/ann", "record", "accepted", at=at) for n, at in ((9, at), (10, 60.0))]
    record.outputs.append(Output("ann", 10, 34))
    record.sums = {"ann": 34}
    assert (violations(record) == []) is excused


@pytest.mark.parametrize(("began", "excused"), [(30.0, True), (50.0, False)])
def test_an_output_may_come_twice_only_if_a_failover_came_between(began: float, excused: bool) -> None:
    """A record that has waited for a worker is not of the moment before the failover; its commit is."""
    record = good()
    failed_over(record, began)
    record.sent[-1] = replace(record.sent[-1], at=20.0)
    record.outputs[1:] = [Output("ann", 8, 15, at) for at in (29.8, 33.5)]
    assert (violations(record) == []) is excused


def test_a_slot_that_moves_excuses_nothing() -> None:
    record = good()
    record.struck = [Struck("migrate slot", "queue", 0, 1.8, 2.5)]
    record.runs.append(Run("plain:1", "a", 1, 11, 4.0, 5.0, True))
    [found] = violations(record)
    assert found.startswith("double: ")


def test_jobs_end_again_when_the_longest_pause_of_the_failover_is_over() -> None:
    record = good()
    record.struck = [
        Struck("kill primary", "queue", 0, 10.0, 12.0),
        Struck("kill primary", "events", 0, 0.0, 1.0),
    ]
    one = Run("plain:2", "b", 1, 10, 9.0, 10.1, True)
    record.runs = [replace(one, ended=ended) for ended in (10.1, 14.5, 14.6, 19.1, 20.0, 30.0)]
    assert find_restarts(record, "kill primary", "queue") == [4.5]
