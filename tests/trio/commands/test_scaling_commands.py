"""Telling: everybody is told what was decided for them, again before it is over, and no more often than that."""

from collections.abc import Mapping
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from celery5.logs.log import Log
from celery5.protocol.scaling.autoscale import AutoscaleState
from celery5.protocol.scaling.prioritisation import Preference
from celery5.protocol.scaling.snapshot import ClusterSnapshot, ClusterWorker
from celery5.services.scaling.scaling_commands import (
    COMMAND_TTL,
    MAX_NAMED_TASKS,
    MIN_COMMAND_INTERVAL,
    RENEW_INTERVAL,
    ScalingCommands,
)


class Post:
    """Keeps what is posted, with the time; a full inbox takes nothing."""

    def __init__(self) -> None:
        self.sent: list[tuple[float, str, str, Mapping[str, Any]]] = []
        self.full: set[str] = set()
        self.began = 0.0

    async def send(self, inbox: str, command: str, parameters: Mapping[str, Any], /) -> bool:
        """Keep it."""
        if inbox in self.full:
            return False
        self.sent.append((round(trio.current_time() - self.began), inbox, command, parameters))
        return True

    def begin(self) -> "ScalingCommands":
        """Whoever posts here."""
        self.began = trio.current_time()
        return ScalingCommands(command_sender=self, log=Log(worker="s", app="shop"))

    def told(self, command: str) -> list[tuple[float, str]]:
        """Who was told that, and when."""
        return [(at, inbox) for at, inbox, kind, _ in self.sent if kind == command]


def workers(*names: str, prefetch: float = 1.0) -> ClusterSnapshot:
    """These workers."""
    return ClusterSnapshot(
        workers=tuple(ClusterWorker(name=name, queues=("q",), prefetch=prefetch) for name in names)
    )


FAR = AutoscaleState(workers=2, prefetch=4.0, crowded=("q",), events=2, at=1.0)
NEAR = AutoscaleState(workers=2, at=1.0)
FIRST = Preference({"slow": 0.1})


async def test_command_is_repeated_until_the_worker_confirms_it(
    autojump_clock: MockClock,
) -> None:
    post = Post()
    telling = post.begin()
    for second in range(0, 200, 2):
        knows = second > 15
        await telling.send_changes(workers("w:a", prefetch=4.0 if knows else 1.0), FAR, Preference(), ())
        await trio.sleep(2)
    assert post.told("prefetch") == [
        (0, "w"),
        (MIN_COMMAND_INTERVAL, "w"),
        (MIN_COMMAND_INTERVAL + RENEW_INTERVAL, "w"),
    ]
    assert post.sent[0][3] == {"factor": 4.0, "seconds": COMMAND_TTL}
    assert RENEW_INTERVAL < COMMAND_TTL / 2


async def test_only_workers_with_another_budget_are_sent_a_command(
    autojump_clock: MockClock,
) -> None:
    post = Post()
    telling = post.begin()
    more = AutoscaleState(workers=2, concurrency=2.0, events=1, at=1.0)
    await telling.send_changes(workers("w:a", "v:b"), more, Preference(), ())
    assert post.told("concurrency") == [(0, "w"), (0, "v")]
    assert post.told("prefetch") == []
    assert post.sent[0][3] == {"factor": 2.0, "seconds": COMMAND_TTL}
    back = ClusterSnapshot(
        workers=(ClusterWorker(name="w:a", concurrency=2.0), ClusterWorker(name="v:b", concurrency=1.0))
    )
    await trio.sleep(MIN_COMMAND_INTERVAL)
    await telling.send_changes(back, NEAR, Preference(), ())
    assert post.told("concurrency")[2:] == [(MIN_COMMAND_INTERVAL, "w")]


async def test_only_workers_with_another_read_order_are_told_at_once(
    autojump_clock: MockClock,
) -> None:
    post = Post()
    telling = post.begin()
    await telling.send_changes(workers("w:a"), NEAR, Preference(), ())
    assert not post.sent
    await telling.send_changes(workers("w:a", prefetch=4.0), NEAR, Preference(), ())
    assert [message[3]["factor"] for message in post.sent] == [1.0]


async def test_preference_changes_are_logged_at_most_every_few_seconds(
    autojump_clock: MockClock,
) -> None:
    post = Post()
    telling = post.begin()
    for second in range(30):
        weight = 0.1 if second % 2 else 0.9
        await telling.send_changes(workers("w:a"), None, Preference({"slow": weight}), ())
        await trio.sleep(1)
    assert post.told("prefer") == [(1, "w"), (12, "w"), (23, "w")]
    for _ in range(30):
        await telling.send_changes(workers("w:a"), None, Preference(), ())
        await trio.sleep(1)
    assert post.sent[-1][3] == {"tasks": {}, "queues": {}, "seconds": COMMAND_TTL}
    assert len(post.told("prefer")) == 4, "neutral needs no renewal"


async def test_a_worker_that_comes_later_is_told_too_and_one_that_is_gone_forgotten(
    autojump_clock: MockClock,
) -> None:
    post = Post()
    telling = post.begin()
    await telling.send_changes(workers("v:a"), None, FIRST, ())
    await telling.send_changes(workers("v:a", "w:b"), None, FIRST, ())
    await telling.send_changes(workers("w:b"), None, FIRST, ())
    await telling.send_changes(workers("v:a", "w:b"), None, FIRST, ())  # of the same name, after a while
    assert [inbox for _, inbox in post.told("prefer")] == ["v", "w", "v"]
    telling.reset()
    await telling.send_changes(workers("v:a"), None, FIRST, ())
    assert len(post.told("prefer")) == 4


@pytest.mark.parametrize(("workers_", "shares"), [(5, [3, 2]), (4, [2, 2]), (1, [1, 0]), (0, [0, 0])])
async def test_controllers_share_all_workers(
    autojump_clock: MockClock, workers_: int, shares: list[int]
) -> None:
    post = Post()
    telling = post.begin()
    course = AutoscaleState(workers=workers_, at=1.0)
    post.full.add("b")
    for _ in range(3):
        await telling.send_changes(workers("w:a"), course, Preference(), ("b:1", "a:1"))
    assert post.told("scale") == [(0, "a")], "what could not be posted is tried again, what was is not"
    post.full.clear()
    await telling.send_changes(workers("w:a"), course, Preference(), ("b:1", "a:1"))
    assert [message[3] for message in post.sent] == [{"workers": share, "of": workers_} for share in shares]


async def test_no_command_is_sent_for_a_number_that_holds_already(
    autojump_clock: MockClock,
) -> None:
    post = Post()
    telling = post.begin()
    await telling.send_changes(workers("v:a", "w:a"), AutoscaleState(workers=2), Preference(), ("c:1",))
    assert not post.sent
    await telling.send_changes(
        workers("w:a"), AutoscaleState(workers=2), Preference(), ("c:1",)
    )  # fewer than the minimum
    assert post.told("scale") == [(0, "c")]


async def test_a_command_names_no_more_tasks_than_it_may(autojump_clock: MockClock) -> None:
    post = Post()
    telling = post.begin()
    many = {f"t{n}": 0.01 + n / 1000 for n in range(500)}
    await telling.send_changes(workers("w:a"), None, Preference(many), ())
    told = post.sent[0][3]["tasks"]
    assert set(told) == {f"t{n}" for n in range(MAX_NAMED_TASKS)}


async def test_a_controller_that_may_not_have_heard_is_told_again_after_a_while(
    autojump_clock: MockClock,
) -> None:
    post = Post()
    telling = post.begin()
    for _ in range(0, 200, 2):
        await telling.send_changes(workers("w:a"), NEAR, Preference(), ("c:a",))
        await trio.sleep(2)
    assert post.told("scale") == [(0, "c"), (RENEW_INTERVAL, "c")]


async def test_worker_gets_commands_for_its_queues_once_per_incarnation(
    autojump_clock: MockClock,
) -> None:
    post = Post()
    telling = post.begin()
    lives = (
        ClusterWorker(name="w:a", queues=("near",), process="p"),
        ClusterWorker(name="w@mails:b", queues=("q",), process="p"),
    )
    one = ClusterSnapshot(
        workers=(ClusterWorker(name="w:a", queues=("near", "q"), process="p", incarnations=lives),)
    )
    for _ in range(3):
        await telling.send_changes(one, FAR, FIRST, ())
        await trio.sleep(1)
    assert post.told("prefetch") == [(0, "w@mails")]
    assert post.told("prefer") == [(0, "w"), (0, "w@mails")]


async def test_while_not_all_can_be_seen_controllers_are_told_only_what_was_decided(
    autojump_clock: MockClock,
) -> None:
    post = Post()
    telling = post.begin()
    partly = ClusterSnapshot(workers=workers("w:a").workers, unreachable=("mails",))
    await telling.send_changes(partly, AutoscaleState(workers=5), Preference(), ("c:1",))
    assert not post.sent
    await telling.send_changes(partly, AutoscaleState(workers=5, at=1.0), Preference(), ("c:1",))
    assert post.told("scale") == [(0, "c")]
