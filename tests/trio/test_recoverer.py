"""Recoverer: after an outage it judges nobody until its own worker's heart has beaten steadily for a while.

Floor: tests. Reads: nothing. Writes: nothing. The clock is Trio's virtual one, so minutes cost nothing.
"""

import pytest
import trio
from trio.testing import MockClock

from celery5.broker.call import Call
from celery5.broker.calls import Pulse, Recovered
from celery5.broker.keys import Keys
from celery5.log import Log
from celery5.services.lease import Lease
from celery5.services.recoverer import RETURNING, Recoverer

MAIL = Keys("shop").of("mail")
LAPSED = Pulse(alive=True, lapsed=1, due_in=None)


class Judged:
    """A server on which nobody has anything to recover; it notes when it was asked."""

    def __init__(self) -> None:
        self.at: list[float] = []

    async def perform(self, _call: Call[Recovered], /) -> Recovered:
        """Somebody is judged now."""
        self.at.append(trio.current_time())
        return Recovered(worker="", back=0, buried=0, more=False)


async def beats(recoverer: Recoverer, *, every: float, until: float) -> None:
    """A steady heart that sees a lapsed lease at each beat."""
    while trio.current_time() < until:
        recoverer.hear(MAIL, LAPSED)
        await trio.sleep(every)


async def judging(nursery: trio.Nursery, *, lease: float) -> tuple[Recoverer, list[float]]:
    """A recoverer that runs, and the times at which it has judged so far."""
    server = Judged()
    recoverer = Recoverer(
        redis=server,
        consumed=[MAIL],
        lease=Lease(seconds=lease),
        log=Log(worker="w", app="shop"),
        max_deliveries=3,
        results_ttl=60.0,
    )
    await nursery.start(recoverer.run)
    return recoverer, server.at


async def test_nobody_is_judged_until_the_judges_own_heart_has_beaten_steadily(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    recoverer, judged = await judging(nursery, lease=9.0)
    for _ in range(2):  # at its start, and after an outage
        began = trio.current_time()
        await beats(recoverer, every=3.0, until=began + 12.0)
        assert judged[0] == pytest.approx(began + RETURNING)
        await trio.sleep(60.0)
        judged.clear()
    nursery.cancel_scope.cancel()


async def test_a_heart_that_stumbles_has_to_beat_steadily_anew(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    recoverer, judged = await judging(nursery, lease=3.0)
    for _ in range(5):  # a silence that is longer than two beats, and shorter than the wait
        recoverer.hear(MAIL, LAPSED)
        await trio.sleep(2.5)
    assert judged == []
    last = trio.current_time() - 2.5
    await beats(recoverer, every=1.0, until=last + 8.0)
    assert judged[0] == pytest.approx(last + 2.5 + 3.0)
    assert len(judged) > 1, "and from then on who lapses is judged at once"
    nursery.cancel_scope.cancel()
