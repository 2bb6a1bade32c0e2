"""Link schedules: hundreds of interleavings of callers, cancellations, slow replies and lost connections.

Whatever happens, a caller gets its own reply or a defined error, and nothing is sent twice unless it may be.
Virtual time: a schedule with seconds of waiting takes milliseconds.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery5.broker.call import Call
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.errors import BrokerUnavailable
from tests.night import examples
from tests.trio.connections.echo_peer import EchoPeer

pytestmark = pytest.mark.timeout(300)  # hundreds of examples, on a machine that may be busy
TIMING = Timing(reply=60, connect=60, idle_ping=30, backoff_cap=0.5, breaker_failures=50)


def echo(token: str, *, repeatable: bool = False) -> Call[str]:
    """Have a token repeated."""
    return Call(("ECHO", token), lambda raw: str(raw, "ascii"), repeatable=repeatable)


@dataclass
class Tally:
    """How calls ended, by token."""

    replied: set[str] = field(default_factory=set)
    maybe: set[str] = field(default_factory=set)
    not_sent: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)


class Callers:
    """Tasks that call, are cancelled, and check what they get."""

    def __init__(self, link: TrioRedis, random: Random) -> None:
        self._link = link
        self._random = random
        self.tally = Tally()

    async def call_often(self, task: int, *, repeatable: bool, cancelling: float, calls: int = 3) -> None:
        """Make some calls in a row, each of which may be cancelled after a moment or at once."""
        for turn in range(calls):
            token = f"{task}.{turn}"
            limit = self._random.choice((0, 0, 0.001, 0.3, 1)) if self._random.random() < cancelling else 1e6
            with trio.move_on_after(limit) as scope:
                await self._one(token, repeatable=repeatable, several=self._random.random() < 0.2)
            if scope.cancelled_caught:
                self.tally.cancelled.add(token)
            if self._random.random() < 0.5:
                await trio.sleep(self._random.random() / 10)

    async def _one(self, token: str, *, repeatable: bool, several: bool) -> None:
        try:
            if several:
                tokens = [f"{token}.{part}" for part in "abc"]
                got = await self._link.perform_all([echo(text, repeatable=repeatable) for text in tokens])
                assert got == tokens
            else:
                assert await self._link.perform(echo(token, repeatable=repeatable)) == token
            self.tally.replied.add(token)
        except BrokerUnavailable as error:
            (self.tally.maybe if error.maybe_done else self.tally.not_sent).add(token)


def on_virtual_time(main: Callable[[], Awaitable[None]]) -> None:
    """Run one schedule; time passes as soon as everybody waits."""
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def one_schedule(
    random: Random, *, tasks: int, cancelling: float, cuts: list[int], repeatable: bool
) -> tuple[EchoPeer, Tally]:
    """Let tasks call through one link, and give what the peer saw and how the calls ended."""
    async with trio.open_nursery() as nursery:
        peer = EchoPeer(nursery, random, cuts=cuts)
        link = TrioRedis(endpoint=Endpoint(), timing=TIMING, connect=peer.connect)
        await start(nursery, link)
        callers = Callers(link, random)
        async with trio.open_nursery() as inner:
            for task in range(tasks):
                inner.start_soon(
                    partial(callers.call_often, task, repeatable=repeatable, cancelling=cancelling)
                )
        # The link still works, and nothing is left behind.
        while (await anyway(link, "last")) != "last":
            pass
        del peer.seen[b"last"]
        statistics = link.statistics()
        assert statistics.inflight == statistics.unsent == 0
        nursery.cancel_scope.cancel()
    return peer, callers.tally


async def start(nursery: trio.Nursery, link: TrioRedis) -> None:
    """Start it, again when every connection was cut in its handshake for so long that it gave up."""
    for _ in range(3):
        with suppress(BrokerUnavailable):
            await nursery.start(link.run)
            return
    raise AssertionError("it never came up")


async def anyway(link: TrioRedis, token: str) -> str:
    """What a call gives, or how it failed."""
    try:
        return await link.perform(echo(token))
    except BrokerUnavailable as error:
        return str(error)


def seen_of(peer: EchoPeer, token: str) -> set[int]:
    """How often the peer got this call; one number for each of its commands."""
    parts = [f"{token}.{part}".encode() for part in "abc"]
    if any(part in peer.seen for part in parts):
        return {peer.seen[part] for part in parts}
    return {peer.seen[token.encode()]}


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), tasks=st.integers(1, 12), cancelling=st.sampled_from([0.0, 0.3, 0.9]))
def test_each_caller_gets_its_own_reply_while_others_are_cancelled(
    seed: int, tasks: int, cancelling: float
) -> None:
    async def main() -> None:
        peer, tally = await one_schedule(
            Random(seed), tasks=tasks, cancelling=cancelling, cuts=[], repeatable=False
        )
        assert not tally.maybe
        assert not tally.not_sent
        assert peer.connections == 1
        for token in tally.replied:
            assert seen_of(peer, token) == {1}
        for token in tally.cancelled:
            assert seen_of(peer, token) in ({0}, {1})

    on_virtual_time(main)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    tasks=st.integers(1, 12),
    cancelling=st.sampled_from([0.0, 0.3, 0.9]),
    cuts=st.lists(st.integers(10, 400), min_size=1, max_size=6),
    repeatable=st.booleans(),
)
def test_lost_connections_send_nothing_twice_that_may_not_be(
    seed: int, tasks: int, cancelling: float, cuts: list[int], repeatable: bool
) -> None:
    async def main() -> None:
        peer, tally = await one_schedule(
            Random(seed), tasks=tasks, cancelling=cancelling, cuts=cuts, repeatable=repeatable
        )
        most = 2 if repeatable else 1
        assert max(peer.seen.values(), default=0) <= most
        for token in tally.replied:
            assert min(seen_of(peer, token)) >= 1
        for token in tally.not_sent:
            assert seen_of(peer, token) == {0}

    on_virtual_time(main)


@pytest.mark.parametrize("seed", range(60))
def test_a_hundred_tasks_at_once_each_get_their_own_reply(seed: int) -> None:
    async def main() -> None:
        cuts = [] if seed % 2 else [2000, 5000]
        peer, tally = await one_schedule(Random(seed), tasks=100, cancelling=0.4, cuts=cuts, repeatable=False)
        assert max(peer.seen.values()) == 1
        assert tally.replied
        assert tally.cancelled

    on_virtual_time(main)
