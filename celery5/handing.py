"""Handing: what of an application's jobs goes to the Publisher daemon, and what goes to Redis directly (C76, C79).

Floor: domain. Reads: nothing. Writes: jobs, to the daemon.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from celery5.protocol.job import Job

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.publisher_client import PublisherClient


class DaemonSender:
    """What of an application's jobs goes to the daemon that its setting `publisher` names."""

    def __init__(self, app: "App") -> None:
        self._app = app
        self._client: PublisherClient | None = None
        self._said = ""

    def send(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """Hand over what may go by the daemon; gives the rest, which goes to Redis directly. For plain Python."""
        mine, others = self._parted(jobs)
        if mine:
            self._to().publish(mine)
        return others

    async def asend(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """`hand`, from Trio or asyncio."""
        mine, others = self._parted(jobs)
        if mine:
            await self._to().apublish(mine)
        return others

    def _parted(self, jobs: Sequence[Job]) -> tuple[Sequence[Job], Sequence[Job]]:
        """Where something of Redis is to be known before sending returns, it is asked: who has a job's key, or whether
        replicas have it."""
        if self._app.settings.replicas:
            return (), jobs
        if not any(job.lock for job in jobs):
            return jobs, ()
        return [job for job in jobs if not job.lock], [job for job in jobs if job.lock]

    def _to(self) -> "PublisherClient":
        said = self._app.settings.publisher
        if self._client is None or said != self._said:
            from celery5.protocol.daemon_address import parse_daemon_address
            from celery5.publisher_client import PublisherClient  # most applications have no daemon

            self._client = PublisherClient(address=parse_daemon_address(said), app=self._app.name)
            self._said = said
        return self._client

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._client is not None:
            self._client.close()
