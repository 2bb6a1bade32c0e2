"""Publisher: which trips publish which jobs."""

from collections.abc import Sequence
from typing import Any

from celery5.broker.call import Call
from celery5.broker.calls.jobs import PUBLISH, PUBLISH_UNIQUE, SCHEDULE
from celery5.broker.keys import Keys
from celery5.protocol.job.job import Job
from celery5.sending.publisher import BYTES_PER_TRIP, JOBS_PER_TRIP, MAX_KNOWN_QUEUES, PublishPlanner

KEYS = Keys("shop")


def job(number: int, queue: str = "default", at: str = "", lock: str = "") -> Job:
    """A job whose message says its number."""
    return Job(f"id{number}", "shop.t", queue, b"message %d" % number, at, lock=lock)


def announced(made: Sequence[Call[Any]]) -> list[str]:
    """The queues that are announced."""
    return [str(call.words[2]) for call in made if call.words[0] == "SADD"]


def test_one_job_is_one_trip_and_the_first_one_announces_its_queue() -> None:
    publisher = PublishPlanner(keys=KEYS)
    first = publisher.plan_calls([job(1)])
    assert announced(first) == ["default"]
    assert [call.script for call in first] == [None, PUBLISH]
    publisher.record_published([job(1)])
    (second,) = publisher.plan_calls([job(2)])
    keys = KEYS.for_queue("default")
    assert second.words[2:] == (3, keys.stream, keys.jobs, keys.result("id2"), "id2", b"message 2")


def test_a_queue_is_announced_again_until_it_went_through() -> None:
    publisher = PublishPlanner(keys=KEYS)
    assert (
        announced(publisher.plan_calls([job(1)])) == announced(publisher.plan_calls([job(1)])) == ["default"]
    )


def test_a_producer_of_any_number_of_queues_remembers_some_of_them() -> None:
    publisher = PublishPlanner(keys=KEYS)
    for number in range(3 * MAX_KNOWN_QUEUES):
        jobs = [job(number, f"customer-{number}")]
        assert announced(publisher.plan_calls(jobs)) == [f"customer-{number}"]
        publisher.record_published(jobs)
        assert announced(publisher.plan_calls(jobs)) == []
    assert len(publisher._known) <= MAX_KNOWN_QUEUES
    assert len(publisher._announced) <= MAX_KNOWN_QUEUES + 1


def test_jobs_are_grouped_by_queue_and_by_whether_they_wait_in_their_order() -> None:
    publisher = PublishPlanner(keys=KEYS)
    jobs = [job(1), job(2, "mail"), job(3, at="+5"), job(4), job(5, "mail", "99"), job(6)]
    made = publisher.plan_calls(jobs)
    assert announced(made) == ["default", "mail"]
    scripts = [call for call in made if call.script]
    ids = [[word for word in call.words if str(word).startswith("id")] for call in scripts]
    assert [call.script for call in scripts] == [PUBLISH, PUBLISH, SCHEDULE, SCHEDULE]
    assert ids == [["id1", "id4", "id6"], ["id2"], ["id3"], ["id5"]]
    assert b"message 3" in scripts[2].words
    assert "+5" in scripts[2].words
    publisher.record_published(jobs)
    assert announced(publisher.plan_calls(jobs)) == []


def test_job_with_a_key_is_published_with_its_queue_in_order() -> None:
    publisher = PublishPlanner(keys=KEYS)
    (alone,) = [call for call in publisher.plan_calls([job(1, lock="shop.t k")]) if call.script]
    assert alone.script is PUBLISH_UNIQUE
    assert KEYS.for_queue("default").unique_window("shop.t k") in alone.words
    jobs = [job(1), job(2, lock="shop.t k"), job(3, at="+5"), job(4, "mail"), job(5)]
    made = [call for call in publisher.plan_calls(jobs) if call.script]
    ids = [[word for word in call.words if str(word).startswith("id")] for call in made]
    assert [call.script for call in made] == [PUBLISH_UNIQUE, PUBLISH]
    assert ids == [["id1", "id2", "id3", "id5"], ["id4"]]
    assert all(call.repeatable for call in made)


def test_what_was_not_sent_is_known_by_the_job_that_was_in_the_way() -> None:
    publisher = PublishPlanner(keys=KEYS)
    jobs = [job(number, lock="shop.t k") for number in range(1, JOBS_PER_TRIP + 2)]
    made = publisher.plan_calls(jobs)
    first = [sent_job.id.encode() for sent_job in jobs[:JOBS_PER_TRIP]]
    answers = [
        made[0].decode(1),
        made[1].decode([first[0], b"other", *first[2:]]),
        made[2].decode([b"another"]),
    ]
    assert publisher.record_published(jobs, answers) == {"id2": "other", jobs[-1].id: "another"}
    assert publisher.record_published([job(1)], [1, 1]) == publisher.record_published([job(1)]) == {}


def test_many_jobs_go_in_portions() -> None:
    publisher = PublishPlanner(keys=KEYS)
    jobs = [job(number) for number in range(2 * JOBS_PER_TRIP + 1)]
    made = [call for call in publisher.plan_calls(jobs) if call.script]
    assert [len(call.words) for call in made] == [
        5 + 3 * count for count in (JOBS_PER_TRIP, JOBS_PER_TRIP, 1)
    ]
    sent = [word for call in made for word in call.words if str(word).startswith("id")]
    assert sent == [sent_job.id for sent_job in jobs]


def test_large_jobs_go_in_smaller_portions() -> None:
    large = [Job(f"id{n}", "shop.t", "default", b"x" * (BYTES_PER_TRIP // 4 + 1)) for n in range(5)]
    one = [Job("huge", "shop.t", "default", b"x" * (2 * BYTES_PER_TRIP))]
    made = [call for call in PublishPlanner(keys=KEYS).plan_calls([*large, *one]) if call.script]
    assert [len(call.words) for call in made] == [5 + 3 * count for count in (3, 2, 1)]


def test_publishing_may_be_repeated_when_nobody_knows_whether_it_ran() -> None:
    assert all(call.repeatable for call in PublishPlanner(keys=KEYS).plan_calls([job(1), job(2, at="+1")]))


def test_nothing_to_publish_is_no_trip() -> None:
    assert PublishPlanner(keys=KEYS).plan_calls([]) == []


def test_no_two_applications_make_the_same_key() -> None:
    assert Keys("a").for_queue("b.c").stream != Keys("a.b").for_queue("c").stream
    for queue in ("a:b", "a.b", "x"):
        keys = KEYS.for_queue(queue)
        tags = {
            key[key.index("{") : key.index("}")]
            for key in (keys.stream, keys.jobs, keys.result("i}{d"), keys.wake)
        }
        assert tags == {"{shop:" + queue}
