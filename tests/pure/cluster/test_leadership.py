"""Leadership: what a Controller may conclude from the record and its own clock."""

import random

from celery5.protocol.cluster.leadership import (
    LEASE,
    LEASE_MARGIN,
    MIN_POLL_DELAY,
    NO_RECORD,
    OUTAGE_GAP,
    POLL_PERIOD,
    RENEW_PERIOD,
    LeaderRecord,
    LeadershipChange,
    LeadershipState,
    is_superseded,
)

OURS = LeaderRecord(epoch=7, beat=1, leader="a")
THEIRS = LeaderRecord(epoch=8, beat=1, leader="b")
LEADING, _ = LeadershipState(name="a").apply_record(OURS, asked_at=100.0, now=100.2)


def watched(standing: LeadershipState, record: LeaderRecord, *, until: float) -> LeadershipState:
    """Return where it stands after it has seen the same record at each look until then."""
    at = 0.0 if standing.last_record is None else standing.last_reply_at
    while at <= until:
        standing, news = standing.apply_record(record, asked_at=at, now=at)
        assert news in (LeadershipChange.NONE, LeadershipChange.NEW_LEADER)
        at += POLL_PERIOD
    return standing


def test_who_never_saw_a_leader_may_lead_at_once_if_there_is_none() -> None:
    assert LeadershipState(name="a").get_replaceable_version(0.0) == NO_RECORD


def test_a_leader_is_sure_for_a_lease_less_the_margin_from_before_it_asked() -> None:
    assert LEADING.epoch == 7
    assert LEADING.has_valid_lease(100.0 + LEASE - LEASE_MARGIN - 0.001)
    assert not LEADING.has_valid_lease(100.0 + LEASE - LEASE_MARGIN)


def test_an_answer_that_was_long_under_way_makes_nobody_sure() -> None:
    later, news = LEADING.apply_record(LeaderRecord(7, 2, "a"), asked_at=101.0, now=110.0)
    assert (later.epoch, news) == (7, LeadershipChange.NONE)
    assert not later.has_valid_lease(110.0)


def test_candidate_leads_when_the_record_is_unchanged_for_a_lease() -> None:
    waits, news = LeadershipState(name="a").apply_record(THEIRS, asked_at=0.0, now=0.1)
    assert (waits.epoch, news) == (0, LeadershipChange.NEW_LEADER)
    assert waits.get_replaceable_version(0.1 + LEASE - 0.001) == ""
    again = watched(waits, THEIRS, until=LEASE)
    assert again.get_replaceable_version(0.1 + LEASE) == THEIRS.version
    renewed, _ = again.apply_record(LeaderRecord(8, 2, "b"), asked_at=3.0, now=3.05)
    assert renewed.get_replaceable_version(3.1) == ""


def test_while_redis_is_silent_nobody_takes_a_leaders_place() -> None:
    """A call that is sent to a frozen server runs when that goes on, before the leader could renew its record."""
    waits = watched(LeadershipState(name="a"), THEIRS, until=2.0)
    frozen = waits.last_reply_at
    assert (
        waits.get_replaceable_version(frozen + OUTAGE_GAP + 0.001)
        == waits.get_replaceable_version(frozen + 60)
        == ""
    )


def test_after_an_outage_a_leader_has_a_whole_lease_to_be_heard_again() -> None:
    waits = watched(LeadershipState(name="a"), THEIRS, until=2.5)
    thawed = waits.last_reply_at + 4
    waits, _ = waits.apply_record(THEIRS, asked_at=thawed, now=thawed)
    assert waits.get_replaceable_version(thawed) == ""
    assert (
        watched(waits, THEIRS, until=thawed + LEASE - POLL_PERIOD).get_replaceable_version(
            thawed + LEASE - 0.001
        )
        == ""
    )
    dead = watched(waits, THEIRS, until=thawed + LEASE)
    assert dead.get_replaceable_version(thawed + LEASE) == THEIRS.version


def test_a_healthy_leader_is_never_replaced_however_redis_flaps() -> None:
    """Redis is silent and answers again at random, and answers late. The leader renews whenever it is answered."""
    for seed in range(200):
        chance = random.Random(seed)
        waits, record, now, renewed = LeadershipState(name="a"), THEIRS, 0.0, 0.0
        while now < 60:
            silent = chance.choice([0.0, 0.0, chance.uniform(0, 6)])
            sent = waits.get_replaceable_version(
                now + chance.uniform(0, silent)
            )  # runs when Redis answers again
            now += silent + 0.001
            if now - renewed >= RENEW_PERIOD and chance.random() < 0.5:  # whose call comes first is chance
                record, renewed = LeaderRecord(8, record.beat + 1, "b"), now
            assert sent != record.version, f"seed {seed}: replaced at {now}"
            waits, _ = waits.apply_record(record, asked_at=now, now=now)
            if now - renewed >= RENEW_PERIOD:
                record, renewed = LeaderRecord(8, record.beat + 1, "b"), now
            now += POLL_PERIOD


def test_a_leader_that_another_one_has_replaced_stands_by() -> None:
    gone, news = LEADING.apply_record(THEIRS, asked_at=105.0, now=105.1)
    assert (gone.epoch, gone.has_valid_lease(105.1), news) == (0, False, LeadershipChange.LOST)


def test_a_leader_that_leads_anew_does_so_in_another_epoch() -> None:
    again, news = LEADING.apply_record(LeaderRecord(9, 1, "a"), asked_at=105.0, now=105.1)
    assert (again.epoch, news) == (9, LeadershipChange.ACQUIRED)


def test_a_leader_whose_record_was_lost_goes_on_and_waits_when_it_is_not_sure() -> None:
    later, news = LEADING.apply_record(LeaderRecord(), asked_at=101.0, now=101.1)
    assert (later.epoch, later.valid_until, news) == (7, LEADING.valid_until, LeadershipChange.NONE)
    assert later.get_replaceable_version(101.2) == NO_RECORD
    assert later.get_replaceable_version(103.0) == ""
    assert (
        watched(later, LeaderRecord(), until=101.1 + LEASE).get_replaceable_version(101.1 + LEASE)
        == NO_RECORD
    )


def test_a_leader_renews_and_who_waits_looks_when_the_lease_lapses() -> None:
    assert LEADING.get_poll_delay(100.2) == RENEW_PERIOD
    waits, _ = LeadershipState(name="a").apply_record(THEIRS, asked_at=0.0, now=0.0)
    assert waits.get_poll_delay(0.0) == POLL_PERIOD
    assert abs(waits.get_poll_delay(LEASE - 0.1) - 0.1) < 1e-9
    assert waits.get_poll_delay(LEASE + 1) == MIN_POLL_DELAY


def test_a_process_of_an_older_epoch_is_superseded() -> None:
    assert is_superseded(6, OURS)
    assert not is_superseded(7, OURS)
    assert not is_superseded(8, OURS)
    assert not is_superseded(1, LeaderRecord())
