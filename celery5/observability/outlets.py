"""Send the metrics of processes to other systems."""

from typing import Protocol

import trio

from celery5.protocol.observability.report import MetricsReport
from celery5.protocol.observability.statsd import make_datagrams, parse_statsd_address


class MetricsOutlet(Protocol):
    """Gets the report of each process, every `metrics_interval` seconds: `app.metrics.add_outlet(MyOutlet())`."""

    async def send(self, report: MetricsReport, /) -> None:
        """Send on what one process has measured since its report before.

        It runs on Trio, in every process, and has 5 seconds. What it raises is logged once, and stops nothing.
        """
        ...


class StatsDOutlet:
    """Sends metrics to a StatsD, by UDP. The setting `statsd` does the same.

    Args:
        url: `udp://host:port`. Labels become parts of the name, unless it ends in `?tags=dogstatsd`.
        prefix: What all names begin with, before their own `celery5`.

    Raises:
        Misconfigured: The URL is none.
    """

    def __init__(self, url: str, *, prefix: str = "") -> None:
        self._address = parse_statsd_address(url)
        self._prefix = prefix

    async def send(self, report: MetricsReport, /) -> None:
        """Send a report in as few datagrams as it fits into."""
        host, port, has_tags = self._address
        found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_DGRAM)
        family, _, _, _, address = found[0]
        with trio.socket.socket(family, trio.socket.SOCK_DGRAM) as sender:
            for datagram in make_datagrams(report, has_tags=has_tags, prefix=self._prefix):
                await sender.sendto(datagram, address)
