"""Shards: their names, the setting, and which of them a job goes to."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5 import App, Misconfigured
from celery5.limits import Limit, Rate
from celery5.protocol.job.job import new_id
from celery5.protocol.shards import (
    MAX_SHARDS,
    choose_shard,
    find_shards,
    get_queue_of_shard,
    list_shards,
    parse_shards,
)
from tests.redis.sharding.declaring import declare

QUEUES = st.text(
    st.characters(blacklist_characters="{},#", blacklist_categories=("Zs", "Cc", "Cs")), min_size=1
)
COUNTS = st.integers(1, MAX_SHARDS)


@pytest.mark.parametrize("setting", ["mails=8 reports=4", {"mails": 8, "reports": 4}])
def test_the_numbers_of_shards_are_read_from_text_and_from_a_table(setting: Any) -> None:
    assert parse_shards(setting) == {"mails": 8, "reports": 4}


def test_a_number_of_one_is_kept_since_there_may_have_been_more() -> None:
    app = App("shop", shards={"mails": 1})
    assert app.brokers.shards == {"mails": 1}
    assert not app.brokers.is_sharded("mails")


@pytest.mark.parametrize(
    "setting",
    [
        "mails",
        "mails=0",
        "mails=257",
        "mails=x",
        "=3",
        "mails#1=2",
        {"mails": 2.0},
        {"mails": True},
        {"a b": 2},
    ],
)
def test_a_wrong_number_of_shards_is_refused_in_one_line(setting: Any) -> None:
    with pytest.raises(Misconfigured, match="shards") as refused:
        _ = App("shop", shards=setting).settings
    assert "\n" not in str(refused.value).replace("\n  ", " ")


@pytest.mark.parametrize("name", ["mails#1", "#", "mails#"])
def test_no_queue_has_the_mark_of_shards_in_its_name(name: str) -> None:
    with pytest.raises(Misconfigured, match="#"):
        App("shop").task(queue=name)(print)
    with pytest.raises(Misconfigured):
        _ = App("shop", default_queue=name).settings


@given(QUEUES, COUNTS, st.text())
def test_a_word_has_one_shard_of_its_queue(queue: str, count: int, word: str) -> None:
    shard = choose_shard(queue, count, word)
    assert shard == choose_shard(queue, count, word)
    assert shard in list_shards(queue, count)
    assert get_queue_of_shard(shard) == queue
    assert choose_shard(queue, 1, word) == queue == list_shards(queue, count)[0]


@given(QUEUES, COUNTS, COUNTS)
def test_shards_of_an_earlier_number_are_found_among_known_queues(queue: str, now: int, before: int) -> None:
    known = [*list_shards(queue, before), *list_shards(f"{queue}s", before), "default"]
    found = find_shards(queue, now, known)
    assert set(found) == set(list_shards(queue, max(now, before)))
    assert found[:now] == list_shards(queue, now)


def test_ids_spread_over_all_shards_alike() -> None:
    counts = dict.fromkeys(list_shards("mails", 8), 0)
    for _ in range(8000):
        counts[choose_shard("mails", 8, new_id())] += 1
    assert min(counts.values()) > 800


class Shop:
    """An application whose queue `mails` has eight shards, and a task of it with some options."""

    def __init__(self, **options: Any) -> None:
        self.app = App("shop", shards="mails=8")

        async def push(customer: str, order: int = 0) -> None: ...

        self.push: Any = declare(self.app, push, **options)

    def queues(self, *, customers: int = 1, **options: Any) -> set[str]:
        task = self.push.options(**options) if options else self.push
        return {task.job(f"c{n % customers}", n).queue for n in range(100)}


def test_a_job_goes_to_the_shard_of_its_id() -> None:
    shop = Shop()
    job = shop.push.job("ann")
    assert job.queue == choose_shard("mails", 8, job.id)
    assert shop.queues() == set(list_shards("mails", 8))


def test_jobs_with_one_unique_key_go_to_one_shard() -> None:
    assert len(Shop().queues(key="nightly")) == 1
    shop = Shop(unique_for=60)
    assert shop.push.job("ann").queue == shop.push.job("ann").queue


@pytest.mark.parametrize(
    "options", [{"limit": 3}, {"limit": 1}, {"rate_limit": "5/s"}, {"limit": 3, "fair_key": "customer"}]
)
def test_jobs_of_a_task_with_a_limit_of_all_workers_go_to_the_first_shard(options: Any) -> None:
    assert Shop(**options).queues() == {"mails"}
    assert Shop(**options).queues(key="nightly") == {"mails"}


@pytest.mark.parametrize(
    "options",
    [
        {"limit": Limit(3, per="worker")},
        {"rate_limit": Rate("5/s", per="worker")},
        {"fair_key": "customer"},
    ],
)
def test_jobs_of_a_task_without_a_limit_of_all_workers_are_spread(options: Any) -> None:
    assert Shop(**options).queues() == set(list_shards("mails", 8))


def test_jobs_with_one_concurrency_key_go_to_one_shard() -> None:
    shop = Shop(limit=1, concurrency_key="customer")
    assert len(shop.queues()) == 1
    assert len(shop.queues(customers=50)) == 8
    with pytest.raises(Misconfigured, match="counted by concurrency key"):
        shop.push.options(key="nightly").job("ann")
    shards = {shop.push.options(key="nightly", id=f"job-{n}").job("ann").queue for n in range(8)}
    assert shards == {shop.push.job("ann").queue}, "one with an id has the same arguments each time"


def test_a_queue_without_shards_is_as_before() -> None:
    app = App("shop", shards={"mails": 1})

    @app.task(queue="mails")
    async def push() -> None: ...

    assert push.job().queue == "mails"
    assert push.queue == "mails"
