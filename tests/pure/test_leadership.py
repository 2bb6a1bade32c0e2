"""Leadership: what a Controller may conclude from the record and its own clock.

Floor: tests. Reads: nothing. Writes: nothing.
"""

import random

from celery5.protocol.leadership import (
    GAP,
    LEASE,
    LOOK,
    MARGIN,
    NOTHING,
    RENEW,
    SHORTEST,
    News,
    Record,
    Standing,
    is_superseded,
)

OURS = Record(epoch=7, beat=1, leader="a")
THEIRS = Record(epoch=8, beat=1, leader="b")
LEADING, _ = Standing(name="a").heard(OURS, asked=100.0, now=100.2)


def watched(standing: Standing, record: Record, *, until: float) -> Standing:
    """Return where it stands after it has seen the same record at each look until then."""
    at = 0.0 if standing.seen is None else standing.heard_at
    while at <= until:
        standing, news = standing.heard(record, asked=at, now=at)
        assert news in (News.NONE, News.ANOTHER)
        at += LOOK
    return standing


def test_who_never_saw_a_leader_may_lead_at_once_if_there_is_none() -> None:
    assert Standing(name="a").replaces(0.0) == NOTHING


def test_a_leader_is_sure_for_a_lease_less_the_margin_from_before_it_asked() -> None:
    assert LEADING.epoch == 7
    assert LEADING.sure(100.0 + LEASE - MARGIN - 0.001)
    assert not LEADING.sure(100.0 + LEASE - MARGIN)


def test_an_answer_that_was_long_under_way_makes_nobody_sure() -> None:
    later, news = LEADING.heard(Record(7, 2, "a"), asked=101.0, now=110.0)
    assert (later.epoch, news) == (7, News.NONE)
    assert not later.sure(110.0)


def test_who_waits_takes_the_place_of_a_leader_whose_record_has_not_changed_for_a_lease() -> None:
    waits, news = Standing(name="a").heard(THEIRS, asked=0.0, now=0.1)
    assert (waits.epoch, news) == (0, News.ANOTHER)
    assert waits.replaces(0.1 + LEASE - 0.001) == ""
    again = watched(waits, THEIRS, until=LEASE)
    assert again.replaces(0.1 + LEASE) == THEIRS.words
    renewed, _ = again.heard(Record(8, 2, "b"), asked=3.0, now=3.05)
    assert renewed.replaces(3.1) == ""


def test_while_redis_is_silent_nobody_takes_a_leaders_place() -> None:
    """A call that is sent to a frozen server runs when that goes on, before the leader could renew its record."""
    waits = watched(Standing(name="a"), THEIRS, until=2.0)
    frozen = waits.heard_at
    assert waits.replaces(frozen + GAP + 0.001) == waits.replaces(frozen + 60) == ""


def test_after_an_outage_a_leader_has_a_whole_lease_to_be_heard_again() -> None:
    waits = watched(Standing(name="a"), THEIRS, until=2.5)
    thawed = waits.heard_at + 4
    waits, _ = waits.heard(THEIRS, asked=thawed, now=thawed)
    assert waits.replaces(thawed) == ""
    assert watched(waits, THEIRS, until=thawed + LEASE - LOOK).replaces(thawed + LEASE - 0.001) == ""
    dead = watched(waits, THEIRS, until=thawed + LEASE)
    assert dead.replaces(thawed + LEASE) == THEIRS.words


def test_a_healthy_leader_is_never_replaced_however_redis_flaps() -> None:
    """Redis is silent and answers again at random, and answers late. The leader renews whenever it is answered."""
    for seed in range(200):
        chance = random.Random(seed)
        waits, record, now, renewed = Standing(name="a"), THEIRS, 0.0, 0.0
        while now < 60:
            silent = chance.choice([0.0, 0.0, chance.uniform(0, 6)])
            sent = waits.replaces(now + chance.uniform(0, silent))  # runs when Redis answers again
            now += silent + 0.001
            if now - renewed >= RENEW and chance.random() < 0.5:  # whose call comes first is chance
                record, renewed = Record(8, record.beat + 1, "b"), now
            assert sent != record.words, f"seed {seed}: replaced at {now}"
            waits, _ = waits.heard(record, asked=now, now=now)
            if now - renewed >= RENEW:
                record, renewed = Record(8, record.beat + 1, "b"), now
            now += LOOK


def test_a_leader_that_another_one_has_replaced_stands_by() -> None:
    gone, news = LEADING.heard(THEIRS, asked=105.0, now=105.1)
    assert (gone.epoch, gone.sure(105.1), news) == (0, False, News.LOST)


def test_a_leader_that_leads_anew_does_so_in_another_epoch() -> None:
    anew, news = LEADING.heard(Record(9, 1, "a"), asked=105.0, now=105.1)
    assert (anew.epoch, news) == (9, News.LEADS)


def test_a_leader_whose_record_was_lost_goes_on_and_waits_when_it_is_not_sure() -> None:
    later, news = LEADING.heard(Record(), asked=101.0, now=101.1)
    assert (later.epoch, later.until, news) == (7, LEADING.until, News.NONE)
    assert later.replaces(101.2) == NOTHING
    assert later.replaces(103.0) == ""
    assert watched(later, Record(), until=101.1 + LEASE).replaces(101.1 + LEASE) == NOTHING


def test_a_leader_renews_and_who_waits_looks_when_the_lease_lapses() -> None:
    assert LEADING.pause(100.2) == RENEW
    waits, _ = Standing(name="a").heard(THEIRS, asked=0.0, now=0.0)
    assert waits.pause(0.0) == LOOK
    assert abs(waits.pause(LEASE - 0.1) - 0.1) < 1e-9
    assert waits.pause(LEASE + 1) == SHORTEST


def test_a_process_of_an_older_epoch_is_superseded() -> None:
    assert is_superseded(6, OURS)
    assert not is_superseded(7, OURS)
    assert not is_superseded(8, OURS)
    assert not is_superseded(1, Record())
