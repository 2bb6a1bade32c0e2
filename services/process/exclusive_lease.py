"""Hold a lease that one process at a time may hold, and run something only while it is held."""

from collections.abc import Awaitable, Callable

import trio

from celery5.broker.calls import cluster
from celery5.broker.calls.cluster import ExclusiveLeaseReply
from celery5.broker.driver import AsyncDriver
from celery5.errors import BrokerError
from celery5.services.process.lease import MARGIN_FRACTION, now

LEASE = 5.0
"""Seconds of the lease, after the last renewal."""
RENEWALS_PER_LEASE = 3
"""Renewals within one lease."""


class ExclusiveLease:
    """A lease that one process holds at a time.

    The holder counts its lease from before the request that renewed it, and gives up a little before its end. So it
    has stopped when Redis lets another process have the lease, also while it cannot reach Redis.

    Args:
        redis: The connection to the broker that has the lease.
        key: The lease.
        holder: The name of this process, never used twice.
        candidates: The key with those that ask for the lease; '' where nobody wants to know how many there are.
        on_renew_failed: Called with the error of each renewal that failed.
    """

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        key: str,
        holder: str,
        candidates: str = "",
        on_renew_failed: Callable[[BrokerError], object],
    ) -> None:
        self._redis = redis
        self._key = key
        self._holder = holder
        self._candidates = candidates
        self._on_renew_failed = on_renew_failed
        self._held_until = 0.0

    @property
    def is_held(self) -> bool:
        """Return whether this process holds the lease at this moment, by its own clock."""
        return now() < self._held_until

    async def renew(self) -> ExclusiveLeaseReply:
        """Acquire or renew the lease, if it is free or held here. Raises BrokerError."""
        requested_at = now()
        reply = await self._redis.perform(
            cluster.acquire_lease(self._key, self._holder, lease=LEASE, candidates=self._candidates)
        )
        self._held_until = 0.0 if reply.wait else requested_at + LEASE * (1 - MARGIN_FRACTION)
        return reply

    async def wait_acquired(self) -> None:
        """Wait until this process holds the lease. Raises BrokerError."""
        while wait := (await self.renew()).wait:  # noqa: ASYNC110  it is Redis that changes
            await trio.sleep(min(wait + 0.05, LEASE / 2))

    async def run_while_held(self, run: Callable[[], Awaitable[object]]) -> None:
        """Run something once the lease is acquired, until it ends or the lease is lost: then it is cancelled.

        Raises what it raises, in a group.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep, nursery.cancel_scope)
            await run()
            nursery.cancel_scope.cancel()

    async def release(self) -> None:
        """Let another process have the lease at once. Raises BrokerError."""
        self._held_until = 0.0
        await self._redis.perform(cluster.release_lease(self._key, self._holder, candidates=self._candidates))

    async def _keep(self, scope: trio.CancelScope) -> None:
        """Renew the lease; cancel `scope` when another process has it, or may have it soon."""
        while (left := self._held_until - now()) > 0:
            await trio.sleep(min(left, LEASE / RENEWALS_PER_LEASE))
            with trio.move_on_after(max(0.0, self._held_until - now())):
                try:
                    await self.renew()
                except BrokerError as error:
                    self._on_renew_failed(error)
        scope.cancel()
