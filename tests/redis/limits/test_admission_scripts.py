"""Gates, script by script: who may run, who waits, whose turn it is, and what is left in Redis, each against the real
server.
"""

import time
from collections.abc import Iterator

import pytest
import redis

from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.calls import leases as lease_calls
from celery5.broker.calls import limits
from celery5.broker.calls import queues as queue_calls
from celery5.broker.calls.jobs import Entry
from celery5.broker.drivers.opening import open_blocking
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import GROUP, Keys
from celery5.protocol.job.job import Job
from celery5.protocol.job.messages import SIZE_MARGIN, read_document
from celery5.protocol.limits import AdmissionRule, Rate, get_waiting_list
from celery5.sending.publisher import JOBS_PER_TRIP, PublishPlanner
from celery5.services.worker.admission_control import ADMISSION_BATCH
from celery5.services.worker.recovery import RECOVERY_BATCH as RECOVERED
from tests.redis.limits.limited_jobs import TASK, Gated, message
from tests.redis.worker.one_queue import QueueSize, done, failed, failed_for_good, released


@pytest.fixture
def gate(url: str, app_name: str, redis_client: "redis.Redis") -> Iterator[Gated]:
    """A queue with a gate that one job may pass at a time, and two workers."""
    driver = open_blocking(Endpoint.from_url(url))
    one = Gated(driver, Keys(app_name).for_queue("mail"), redis_client)
    one.join("w")
    one.join("other")
    yield one
    driver.close()


# Slots


def test_as_many_run_as_may_and_the_others_wait_in_redis(gate: Gated) -> None:
    gate.rule = AdmissionRule(TASK, max_running=2)
    gate.send(*"abcd")
    entries = gate.read("w")
    assert gate.ask("w", entries) == [1, 1, 0, 0]
    assert [gate.where(job_id) for job_id in "abcd"] == ["EXECUTING", "EXECUTING", "HELD", "HELD"]
    assert gate.size() == QueueSize(stream=2, in_workers=2, due=0, dead=0, limited=2)
    assert gate.ids(gate.mine("w")) == "ab"
    assert gate.taken() == {"shop.t ": "2", "shop.t  w": "2"}


def test_asking_twice_is_asking_once(gate: Gated) -> None:
    gate.send(*"abc")
    entries = gate.read("w")
    assert gate.ask("w", entries) == [1, 0, 0]
    before = gate.contents()
    assert gate.ask("w", entries) == [1, 0, 0]
    assert gate.contents() == before


def test_whoever_settles_is_handed_the_next_one_in_order(gate: Gated) -> None:
    (a,) = gate.come("w", *"abc")
    (b,) = gate.done("w", a)
    assert (gate.ids([b]), b.lane) == ("b", "g")
    assert gate.where("b") == "EXECUTING"
    assert gate.ids(gate(jobs_calls.read_pending(gate.keys.on_lane("g"), "w", after=b"0", count=9))) == "b"
    (c,) = gate.done("w", b)
    assert gate.done("w", c) == []
    assert [gate.where(job_id) for job_id in "abc"] == ["ENDED"] * 3
    assert gate.is_empty()


def test_jobs_that_are_admitted_out_of_order_wait_in_order(gate: Gated) -> None:
    gate.send(*"abcdef")
    entries = gate.read("w")
    gate.ask("w", entries[3:])
    gate.ask("w", entries[:3])
    running = [entry for entry in entries if entry.id.decode() in gate.slots()]
    handed = ""
    while running:
        handed += gate.ids(running)
        running = gate.done("w", *running)
    assert handed == "dabcef"


def test_who_comes_while_others_wait_does_not_overtake_them(gate: Gated) -> None:
    (a,) = gate.come("w", *"ab")
    assert gate.done("w", a, want=0) == []
    assert gate.come("w", "c") == []
    assert gate.ids(gate.pull("w")) == "b"


def test_a_worker_that_has_no_room_tells_the_others(gate: Gated) -> None:
    (a,) = gate.come("w", *"ab")
    with gate.client.pubsub(ignore_subscribe_messages=True) as heard:
        heard.subscribe(gate.keys.slots_freed)
        heard.get_message(timeout=5)
        gate.done("w", a, want=0)
        message = heard.get_message(timeout=5)
    assert message is not None
    assert message["data"] == b"shop.t"
    assert gate.ids(gate.pull("other")) == "b"


def test_others_are_notified_when_a_job_waits_despite_capacity(gate: Gated) -> None:
    def told(*ids: str, within: float) -> object:
        gate.send(*ids)
        with gate.client.pubsub(ignore_subscribe_messages=True) as heard:
            heard.subscribe(gate.keys.slots_freed)
            heard.get_message(timeout=5)
            assert gate.ask("w", gate.read("w"), how="wait") == [0] * len(ids)
            message = heard.get_message(timeout=within)
        return message and message["data"]

    assert told("a", "b", within=5) == b"shop.t"
    assert gate.ids(gate.pull("other")) == "a"
    assert told("c", within=0.1) is None


def test_nobody_is_told_when_nobody_could_go_on(gate: Gated) -> None:
    (a,) = gate.come("w", *"abc")
    with gate.client.pubsub(ignore_subscribe_messages=True) as heard:
        heard.subscribe(gate.keys.slots_freed)
        heard.get_message(timeout=5)
        gate.done("w", a, want=1)
        assert heard.get_message(timeout=0.1) is None


def test_a_limit_per_worker_is_counted_for_each_by_itself(gate: Gated) -> None:
    gate.rule = AdmissionRule(TASK, max_running=1, per="worker")
    assert gate.ids(gate.come("w", *"abc")) == "a"
    (b,) = gate.pull("other")
    assert gate.pull("other") == gate.pull("w") == []
    assert gate.ids(gate.done("other", b)) == "c"


def test_a_limit_per_key_is_counted_for_each_key_by_itself(gate: Gated) -> None:
    gate.rule = AdmissionRule(TASK, max_running=1, keyed=True)
    (a,) = gate.come("w", *"abc", token="ann x")
    (d,) = gate.come("w", *"de", token="bob")
    assert gate.pull("w") == []
    assert gate.ids(gate.done("w", d)) == "e"
    assert gate.ids(gate.done("w", a)) == "b"
    assert set(gate.taken()) >= {"shop.t ann%20x", "shop.t bob"}


def test_keys_whose_gates_are_full_are_passed_over(gate: Gated) -> None:
    gate.rule = AdmissionRule(TASK, max_running=1, keyed=True)
    tokens = [f"full{n}" for n in range(100)]
    gate.line_up((f"a{token}", token) for token in tokens)
    running = gate.pull("other")
    assert len(running) == len(tokens)
    gate.line_up((f"b{token}", token) for token in tokens)
    gate.line_up([("a", "ann")])
    assert gate.pull("w") == []  # so many are looked at in one trip
    assert 0 < gate.waits[0] < 0.01  # and the worker is to come again at once
    trips = [gate.ids(gate.pull("w")) for _ in range(4)]
    assert "a" in trips
    gate.client.config_resetstat()
    assert gate.pull("w") == []
    assert gate.commands() <= 10  # those that were found full are not looked at again
    assert len(gate.done("other", *running)) == len(tokens)


@pytest.mark.parametrize("together", [1, 20])
@pytest.mark.parametrize("keys", [1, 12, 1000])
def test_a_job_takes_at_most_twenty_commands_however_many_keys_wait(
    gate: Gated, keys: int, together: int
) -> None:
    """From the read to the end of the job: all commands that Redis makes, in scripts and outside. `together` jobs are
    settled in one trip, as far as so many may run."""
    gate.rule, count = AdmissionRule(TASK, max_running=1, keyed=True), max(2 * keys, 200)
    jobs = [(f"j{n}", message(f"j{n}", f"k{n % keys}")) for n in range(count)]
    for first in range(0, count, JOBS_PER_TRIP):
        gate(jobs_calls.publish(gate.keys, jobs[first : first + JOBS_PER_TRIP]))
    gate.client.config_resetstat()
    running: list[Entry] = []
    while entries := gate.read("w", ADMISSION_BATCH):
        fates = gate.ask("w", entries)
        running += [entry for entry, fate in zip(entries, fates, strict=True) if fate == limits.ADMITTED]
    ended = 0
    while running:
        lane = running[0].lane
        batch = [entry for entry in running if entry.lane == lane][:together]
        running = [entry for entry in running if entry not in batch]
        running += gate.done("w", *batch, want=len(batch) + 1)
        ended += len(batch)
    made = gate.commands()
    assert ended == count
    assert made / count <= 20, made / count
    assert gate.is_empty()


@pytest.mark.parametrize("lists", [10, 1000])
@pytest.mark.parametrize(
    "rule", [AdmissionRule(TASK, max_running=1, keyed=True), AdmissionRule(TASK, max_running=1, keyed=True, fair=True), AdmissionRule(TASK, max_running=1, fair=True),  # noqa: E501
             AdmissionRule(TASK, max_running=1, per="worker", keyed=True)], ids=["keyed", "keyed-fair", "fair", "worker"]  # noqa: E501
)  # fmt: skip
def test_no_trip_looks_at_more_lists_the_more_of_them_are_full(
    gate: Gated, rule: AdmissionRule, lists: int
) -> None:
    gate.rule = rule
    gate.line_up(((f"a{n}", f"k{n}") for n in range(lists)), fair="x")
    running: list[Entry] = []
    while more := gate.pull("w"):
        running += more
    gate.line_up(((f"b{n}", f"k{n}") for n in range(lists)), fair="y")
    while gate.pull("w") or gate.waits[0]:
        pass
    gate.client.config_resetstat()
    assert gate.pull("w") == []
    (first, *_others) = running
    handed = gate.done("w", first, want=5)
    assert len(handed) == 1
    assert gate.commands() <= 70
    gate.client.delete(*gate.client.keys("*"))


def test_urgent_jobs_go_first_in_their_line(gate: Gated) -> None:
    gate.send(*"ab")
    entries = gate.read("w")
    gate.ask("w", entries)
    high = gate.keys.on_lane("h")
    low = gate.keys.on_lane("l")
    for keys, job in ((low, "l"), (high, "h")):
        gate.client.xadd(keys.stream, {"job": entries[0].message.replace(b'"a"', f'"{job}"'.encode())})
        gate.client.xgroup_create(keys.stream, "workers", "0")
        gate.ask("w", gate(jobs_calls.read_jobs([keys], "w", count=9, block_seconds=0.001)))
    gate.send("c")
    gate.ask("w", gate.read("w"))
    running, order = entries[:1], ""
    while running:
        running = gate.done("w", *running)
        order += gate.ids(running)
    assert order == "hbcl"


# Turns


def test_fair_keys_take_turns_however_many_jobs_each_has(gate: Gated) -> None:
    gate.rule = AdmissionRule(TASK, fair=True)
    gate.send(*"abcdefgh", fair="large")
    gate.ask("w", gate.read("w"), how="wait")
    gate.send(*"xy", fair="small")
    gate.ask("w", gate.read("w"), how="wait")
    assert gate.ids(gate.pull("w", 6)) == "axbycd"


def test_fair_keys_take_turns_though_one_of_them_has_many_concurrency_keys(gate: Gated) -> None:
    gate.rule = AdmissionRule(TASK, max_running=1, keyed=True, fair=True)
    for n, job in enumerate("abcdef"):
        gate.send(job, token=str(n), fair="large")
    gate.send("x", token="x", fair="small")
    gate.send("y", token="y", fair="small")
    gate.ask("w", gate.read("w"), how="wait")
    assert gate.ids(gate.pull("w", 5)) == "axbyc"


# Rates


def test_no_more_begin_in_a_span_than_the_rate_allows(gate: Gated) -> None:
    gate.rule = AdmissionRule(TASK, rate=Rate("2/60s"))
    assert gate.ids(gate.come("w", *"abcd")) == "ab"
    first = gate.waits[0]
    assert 60 < first <= 61
    assert gate.pull("w") == []
    assert 30 < gate.waits[0] <= first  # as long as is left of it


def test_a_rate_lets_the_next_one_through_when_its_span_is_over(gate: Gated) -> None:
    gate.rule = AdmissionRule(TASK, rate=Rate("2/1s"))
    begun = time.monotonic()
    assert gate.ids(gate.come("w", *"abcde")) == "ab"
    time.sleep(gate.waits[0])
    assert gate.ids(gate.pull("w")) == "cd"
    assert time.monotonic() - begun > 1.0
    assert 1 < gate.waits[0] <= 1.05


def test_a_rate_does_not_mind_how_many_run_at_once(gate: Gated) -> None:
    gate.rule = AdmissionRule(TASK, rate=Rate("5/h"))
    assert gate.ids(gate.come("w", *"abcdefg")) == "abcde"


def test_a_rate_per_worker_is_counted_for_each_by_itself(gate: Gated) -> None:
    gate.rule = AdmissionRule(TASK, rate=Rate("1/h", per="worker"))
    assert gate.ids(gate.come("w", *"abc")) == "a"
    assert gate.ids(gate.pull("other")) == "b"
    assert gate.pull("w") == gate.pull("other") == []


def test_the_starts_of_a_rate_are_forgotten_in_time(gate: Gated) -> None:
    gate.rule = AdmissionRule(TASK, rate=Rate("2/m"))
    gate.come("w", "a")
    (key,) = gate.client.keys(gate.keys.waiting_list_prefix.replace("{", "[{]") + "starts*")
    assert 30_000 < gate.client.pttl(key) <= 61_000


# Deaths


def test_a_death_frees_the_slots_and_tells(gate: Gated) -> None:
    gate.rule = AdmissionRule(TASK, max_running=2)
    a, _b = gate.come("w", *"abcd")
    (c,) = gate.done("w", a, want=1)  # one has its slot on each lane
    with gate.client.pubsub(ignore_subscribe_messages=True) as heard:
        heard.subscribe(gate.keys.slots_freed)
        heard.get_message(timeout=5)
        assert gate.recover("w").requeued == 2
        message = heard.get_message(timeout=5)
    assert message is not None
    assert (gate.slots(), gate.taken()) == ({}, {})
    assert gate.ids(gate.pull("other")) == "d"
    assert gate.settled("w", [c], [done(c, "c")]).owned == limits.LEASE_LOST
    again = gate.read("other")
    assert sorted(gate.ids(again)) == ["b", "c"]
    assert [entry.deliveries for entry in again] == [1, 1]


def test_a_job_keeps_its_deaths_while_it_waits(gate: Gated) -> None:
    (a,) = gate.come("w", *"a")
    gate.send("b")
    gate.join("dead")
    gate.read("dead")
    gate.recover("dead")
    (again,) = gate.read("w")
    assert again.deliveries == 1
    assert gate.ask("w", [again]) == [0]
    (handed,) = gate.done("w", a)
    assert (gate.ids([handed]), handed.deliveries) == ("b", 1)


def test_who_has_lost_his_lease_gets_nothing(gate: Gated) -> None:
    gate.come("w", *"ab")
    gate.client.zadd(gate.keys.leases, {"w": -1})
    before = gate.contents()
    assert gate(limits.admit_waiting(gate.keys, "w", [(gate.rule, 9)])).owned == limits.LEASE_LOST
    assert gate(limits.admit(gate.keys, "w", [], [(gate.rule, 0)])).outcomes is None
    assert gate.contents() == before


# What else becomes of a job


@pytest.mark.parametrize("verb", [done, failed, failed_for_good, released])
def test_however_a_job_is_settled_its_slot_is_free(gate: Gated, verb: object) -> None:
    assert callable(verb)
    (a,) = gate.come("w", "a", "b")
    (b,) = gate.settled("w", [a], [verb(a, "a")], want=1).entries
    before = gate.contents()
    gate.settled("w", [b], [verb(b, "b")], want=1)
    assert gate.is_empty()
    assert before != gate.contents()


def test_what_was_handed_over_and_is_given_back_comes_again(gate: Gated) -> None:
    (a,) = gate.come("w", *"ab")
    (b,) = gate.done("w", a)
    gate.settled("w", [b], [released(b, "b")])
    assert gate.client.xlen(gate.keys.handed) == 0
    assert gate(jobs_calls.promote_due_jobs(gate.keys, limit=9))[0] == 1
    (again,) = gate.read("other")
    assert gate.ids([again]) == "b"
    assert gate.ask("other", [again]) == [1]


def test_what_waits_is_revoked_at_once(gate: Gated) -> None:
    gate.come("w", *"abc")
    assert gate(jobs_calls.revoke(gate.keys, ["b"], ttl=60)) == ["REVOKED"]
    assert gate.where("b") == "ENDED"
    assert gate.held() == {"shop.t": "1"}
    assert gate(jobs_calls.revoke(gate.keys, ["c", "a"], ttl=60)) == ["REVOKED", "EXECUTING"]
    assert gate.room() == []


def test_what_was_revoked_before_it_came_to_the_gate_is_not_held(gate: Gated) -> None:
    gate.come("w", "a")
    gate.send("b")
    entries = gate.read("w")
    assert gate(jobs_calls.revoke(gate.keys, ["b"], ttl=60)) == ["EXECUTING"]
    assert gate.ask("w", entries) == [limits.REVOKED]


def test_what_waits_comes_out_when_it_expires(gate: Gated) -> None:
    gate.come("w", "a")
    gate.send("b", expires=time.time() + 60)
    gate.ask("w", gate.read("w"))
    assert gate.size().limited == 1
    assert gate.size().due == 0
    assert gate(jobs_calls.promote_due_jobs(gate.keys, limit=9))[0] == 0
    gate.fall_due("b")
    assert gate(jobs_calls.promote_due_jobs(gate.keys, limit=9)) == (1, None, 0)
    assert gate.ids(gate.read("w")) == "b"
    assert gate.held() == {}
    assert gate.room() == []


def test_one_that_is_handed_over_in_time_does_not_expire_any_more(gate: Gated) -> None:
    (a,) = gate.come("w", "a")
    gate.send("b", expires=time.time() + 60)
    gate.ask("w", gate.read("w"))
    gate.done("w", a)
    assert gate(jobs_calls.promote_due_jobs(gate.keys, limit=9)) == (0, None, 0)
    assert gate.held() == {}


def test_a_copy_of_a_job_that_waits_goes(gate: Gated) -> None:
    (a,) = gate.come("w", *"ab")
    gate.client.xadd(gate.keys.stream, {"job": a.message.replace(b'"a"', b'"b"')})
    (copy,) = gate.read("w")
    assert gate.ask("w", [copy]) == [limits.GONE]
    assert gate.ids(gate.done("w", a)) == "b"


@pytest.mark.parametrize("how", ["run", "count"])
def test_a_copy_on_the_lane_of_admitted_jobs_gets_no_slot_and_ends_nothing(gate: Gated, how: str) -> None:
    """With a slot for each job of a batch, settling does not look up where the jobs are."""
    gate.come("w", "a")
    gate.send("b")
    gate.client.xadd(gate.keys.handed, {"job": message("b")})
    gate.client.xgroup_create(gate.keys.handed, GROUP, id="0")
    lane = gate.keys.on_lane("g")
    (copy,) = gate(jobs_calls.read_jobs([lane], "w", count=9, block_seconds=0.001))
    gate.rule = AdmissionRule(TASK, max_running=9)
    assert gate.ask("w", [copy], how) == [limits.GONE]
    assert len(gate.slots()) == 1
    gate.done("w", copy, want=0)
    assert gate.where("b") == "SENT"
    assert gate.client.get(gate.keys.result("b")) is None
    assert gate.client.xlen(gate.keys.handed) == 0


def test_jobs_of_a_suspended_task_wait_whatever_room_there_is(gate: Gated) -> None:
    gate.rule = AdmissionRule(TASK, suspended=True)
    gate.send(*"ab")
    assert gate.ask("w", gate.read("w"), how="wait") == [0, 0]
    assert gate.pull("w") == []
    gate.rule = AdmissionRule(TASK)
    assert gate.ids(gate.pull("w")) == "ab"


def test_what_runs_when_a_limit_is_imposed_is_counted(gate: Gated) -> None:
    gate.send(*"ab")
    a, b = gate.read("w")
    assert gate.ask("w", [a], how="count") == [1]
    assert gate.ask("w", [b]) == [0]
    assert gate.ids(gate.done("w", a)) == "b"


def test_it_is_told_who_waits_and_where(gate: Gated) -> None:
    gate.come("w", *"abc")
    sighting = gate(jobs_calls.inspect_job(gate.keys, "c"))
    assert (sighting.place, sighting.jobs_ahead) == ("G shop.t  ", 1)
    assert gate(lease_calls.renew_lease(gate.keys, "w", lease=30)).limited_tasks == ("shop.t",)
    assert gate(queue_calls.get_queue_state(gate.keys)).held == 2


def test_a_slot_whose_answer_was_lost_goes_with_its_job(gate: Gated) -> None:
    gate.send("a")
    (a,) = gate.read("w")
    gate.ask("w", [a])  # and nobody hears the answer
    gate.settled("w", [a], [released(a, "a")])
    assert gate.is_empty()
    assert gate.where("a") == "SENT"


# How much one script does


def worker_with_slots(gate: Gated, *, jobs: int, waiting: int) -> None:
    """Have a worker "dead" hold jobs that have slots, each with its own key, while others wait for each key."""
    gate.rule = AdmissionRule(TASK, max_running=1, keyed=True)
    gate.join("dead")
    gate.line_up((f"a{n}", f"k{n}") for n in range(jobs))
    running: list[Entry] = []
    while more := gate.pull("dead"):
        running += more
    assert len(running) == jobs
    gate.line_up((f"b{n}", f"k{n % jobs}") for n in range(waiting))
    while gate.pull("w") or gate.waits[0]:  # every list is parked
        pass


def test_one_trip_of_a_recovery_makes_few_commands_however_many_keys_and_jobs_wait(gate: Gated) -> None:
    worker_with_slots(gate, jobs=200, waiting=2000)
    most, trips, done_so_far = 0, 0, lease_calls.RecoveryResult("dead", 0, 0, has_more=True)
    while done_so_far.has_more:
        gate.client.config_resetstat()
        done_so_far = gate.recover("dead", limit=RECOVERED)
        most, trips = max(most, gate.commands()), trips + 1
    assert trips == 200 // RECOVERED + 1
    assert most <= 220, most  # two or three for each job that had begun say which worker it took down
    assert gate.slots() == gate.taken() == {}


@pytest.mark.parametrize("jobs", [1000])
def test_a_dead_worker_with_many_jobs_is_recovered_in_well_under_a_second(gate: Gated, jobs: int) -> None:
    worker_with_slots(gate, jobs=jobs, waiting=jobs)
    began = time.monotonic()
    while gate.recover("dead", limit=RECOVERED).has_more:
        pass
    assert time.monotonic() - began < 5  # 0.2 s on a quiet machine
    assert gate.size().stream == jobs


def test_one_trip_of_jobs_that_line_up_makes_few_commands(gate: Gated, app_name: str) -> None:
    gate.rule, jobs = AdmissionRule(TASK, max_running=1, keyed=True, fair=True), list[Job]()
    for n in range(500):
        line = get_waiting_list(gate.rule, f"k{n}", f"f{n}")
        jobs.append(Job(f"j{n}", TASK, "mail", message(f"j{n}", f"k{n}", f"f{n}"), waiting_list=line))
    _announce, *trips = PublishPlanner(keys=Keys(app_name)).plan_calls(jobs)
    made: list[int] = []
    for call in trips:
        gate.client.config_resetstat()
        gate(call)
        made.append(gate.commands())
    assert gate.held() == {"shop.t": "500"}
    assert len(trips) == 5
    assert max(made) <= 450, made


WORKERS = 200


def crowd(gate: Gated) -> None:
    """Have many workers with a lease, each of which holds a job on every lane."""
    leases = {f"c{n}": 4e12 for n in range(WORKERS)}
    gate.client.zadd(gate.keys.leases, leases)
    for stream in gate.keys.streams:
        with gate.client.pipeline() as pipeline:
            for name in leases:
                pipeline.xadd(stream, {"job": "x"})
                if name == "c0" and stream != gate.keys.normal:
                    pipeline.xgroup_create(stream, GROUP, "0")
                pipeline.xreadgroup(GROUP, name, {stream: ">"}, count=1)
            pipeline.execute()


def disperse(gate: Gated) -> None:
    """Remove the crowd."""
    gate.client.delete(gate.keys.leases, *gate.keys.streams)


def test_a_beat_makes_few_commands_however_many_workers_there_are(gate: Gated) -> None:
    crowd(gate)
    # One of them in a while looks at each worker and lane.
    for most in (4 * WORKERS + 40, 30, 30):
        gate.client.config_resetstat()
        pulse = gate(lease_calls.renew_lease(gate.keys, "w", lease=30))
        assert (pulse.alive, pulse.lapsed, pulse.strays, pulse.lanes) == (True, 0, 0, "hlg")
        assert gate.commands() <= most
    disperse(gate)


def test_a_search_for_jobs_of_nobody_makes_one_command_for_each_worker_and_lane(gate: Gated) -> None:
    crowd(gate)
    gate.client.config_resetstat()
    assert gate.recover() == lease_calls.RecoveryResult("", 0, 0, has_more=False)
    assert gate.commands() <= 4 * WORKERS + 10
    disperse(gate)


# What is too large to be read


def too_large(gate: Gated, message_limit: int) -> bytes:
    """Have a worker "dead" hold job "a", whose message is a byte over what the limit allows and names a task."""
    start, end = message("a")[:-1] + b',"args":["', b'"]}'
    large = start + b"x" * (message_limit + SIZE_MARGIN + 1 - len(start) - len(end)) + end
    gate(jobs_calls.publish(gate.keys, [("a", large)]))
    gate.join("dead")
    gate.read("dead")
    return large


def test_a_message_over_the_limit_is_put_back_by_its_id_alone(gate: Gated) -> None:
    large = too_large(gate, 2)
    assert gate.recover("dead", message_limit=2).requeued == 1
    (again,) = gate.read("w")
    assert (again.message, again.deliveries) == (large, 1)
    assert gate.client.hget(gate.keys.jobs, "a") == b"S" + again.id


@pytest.mark.parametrize(("message_limit", "task"), [(2, ""), (3, TASK)])
def test_message_of_a_dead_letter_is_decoded_up_to_the_limit(
    gate: Gated, message_limit: int, task: str
) -> None:
    too_large(gate, 2)
    assert gate.recover("dead", deliveries=0, message_limit=message_limit).dead_lettered == 1
    ((_, _, raw),) = gate(jobs_calls.list_dead_jobs(gate.keys, count=9))
    document = read_document(raw)
    assert (document.id, document.task, document.state) == ("a", task, "DEAD")
    assert gate.where("a") == "DEAD"
