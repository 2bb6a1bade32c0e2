"""Read what `celery5 doctor` checks of a broker. `protocol/health/broker_diagnosis.py` judges it."""

import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from celery5.broker.call import Call
from celery5.broker.calls import health as health_calls
from celery5.broker.calls import jobs, limits
from celery5.broker.drivers.opening import open_blocking
from celery5.broker.endpoint import Endpoint
from celery5.broker.key_types import find_types, list_shared_keys
from celery5.broker.keys import Keys, find_lifetime
from celery5.broker.timing import Timing
from celery5.doctor.server_nodes import read_primary_views
from celery5.errors import BrokerDenied, BrokerError, BrokerReplied
from celery5.protocol.health import broker_diagnosis
from celery5.protocol.health.broker_diagnosis import Finding
from celery5.protocol.health.server_memory import read_server_memory
from celery5.protocol.job.job import new_id

T = TypeVar("T")

CHECK_TIMING = Timing(connect=3.0, reply=5.0)
PINGS = 20
CLOCK_READS = 5
"""How often the clock is read; the quickest reply counts, since it is the most exact."""
MAX_KEYS = 2000
"""The most keys of the application that are examined."""
KEYS_PER_SCAN = 1000
"""Keys that the server scans in one round trip."""
MAX_SCANS = 50
"""The most round trips: of a large keyspace only a part is scanned."""


class BrokerChecks:
    """The checks of one broker, for one application."""

    def __init__(
        self,
        endpoint: Endpoint,
        keys: Keys,
        queue: str,
        *,
        find_filling: Callable[[], str] = str,
        replicas: int = 0,
    ) -> None:
        self._keys = keys
        self._queue = queue
        # How many replicas the setting demands.
        self._replicas = replicas
        # Says what takes the most of the server's memory.
        self._find_filling = find_filling
        self._redis = open_blocking(endpoint, timing=CHECK_TIMING, max_connections=4)
        self._info: dict[str, str] | None = None
        self._config: dict[str, str] | None = None
        self.is_unreachable = False

    @property
    def _endpoint(self) -> Endpoint:
        """The server, or the cluster that it has said to be a part of."""
        return self._redis.endpoint

    def check_server(self) -> Finding:
        """Check that the server answers, and its version. If it does not, its other checks are left out."""
        try:
            self._redis.perform(jobs.PING)
        except BrokerError:
            self.is_unreachable = True
            raise
        return broker_diagnosis.diagnose_server(self._get_info())

    def check_persistence(self) -> Finding:
        """Check that jobs outlive the server."""
        return broker_diagnosis.diagnose_persistence(self._get_info(), self._get_config())

    def check_memory(self) -> Finding:
        """Check what the server does when its memory is full."""
        info = self._redis.perform(health_calls.get_memory_info())
        memory = read_server_memory("", info)
        filled_by = self._find_filling() if memory is not None and memory.is_almost_full else ""
        return broker_diagnosis.diagnose_eviction(info, self._get_config(), filled_by)

    def check_replication(self) -> Finding:
        """Check that a failover has where to go, and what it may lose."""
        if self._endpoint.topology == "cluster":
            primaries = read_primary_views(self._endpoint)
            return broker_diagnosis.diagnose_cluster(primaries, self._get_config(), wanted=self._replicas)
        is_watched = self._endpoint.topology == "sentinel"
        return broker_diagnosis.diagnose_replication(
            self._get_info(),
            self._get_config(),
            wanted=self._replicas,
            sentinels=health_calls.probe_sentinels(self._endpoint) if is_watched else (),
        )

    @property
    def has_replicas(self) -> bool:
        """Whether replicas are expected: on a cluster, with sentinels, or by the setting `replicas`."""
        return self._endpoint.topology != "server" or self._replicas > 0

    def check_clock(self) -> Finding:
        """Check how far the clocks of the server and of this host are apart."""
        duration, server_ahead = float("inf"), 0.0
        for _ in range(CLOCK_READS):
            start = time.time()
            server_time = self._redis.perform(jobs.SERVER_TIME)
            elapsed = time.time() - start
            if elapsed < duration:
                duration, server_ahead = elapsed, server_time - (start + elapsed / 2)
        return broker_diagnosis.diagnose_clock(server_ahead, duration / 2)

    def check_latency(self) -> Finding:
        """Check how long the server takes to answer."""
        pings: list[float] = []
        for _ in range(PINGS):
            start = time.perf_counter()
            self._redis.perform(jobs.PING)
            pings.append(time.perf_counter() - start)
        return broker_diagnosis.diagnose_latency(pings)

    def check_permissions(self) -> Finding:
        """Check that this user may run the commands that celery5 uses."""
        user, probe_id = self._endpoint.username or "", new_id()
        keys = (self._keys.reply(probe_id), self._keys.for_queue(self._queue).result(probe_id))
        try:
            first, second = self._redis.perform_all(
                [health_calls.probe_permissions(key, key) for key in keys]
            )
        except BrokerDenied as error:
            return broker_diagnosis.diagnose_permissions(user, 1, {"EVALSHA": str(error)})
        refused = {**first.refused, **second.refused}
        try:
            self._redis.perform(health_calls.probe_unblock())
        except BrokerDenied as error:
            refused["CLIENT|UNBLOCK"] = str(error)
        if subscribe_error := health_calls.probe_subscribe(self._endpoint, keys[0], CHECK_TIMING):
            refused["SUBSCRIBE"] = subscribe_error
        return broker_diagnosis.diagnose_permissions(user, first.tried + 3, refused)

    def check_keys(self) -> Finding:
        """Check for keys that never expire and should, that nobody knows, or that another program has made.

        If there are many keys, a part is looked at, and those of which an application has one.
        """
        names, cursor, scans = set[str](), 0, 0
        while True:
            cursor, batch = self._redis.perform(
                health_calls.scan_keys(cursor, self._keys.pattern, count=KEYS_PER_SCAN)
            )
            names.update(name for name in batch if self._keys.owns(name))
            scans += 1
            if not cursor or len(names) >= MAX_KEYS or scans == MAX_SCANS:
                break
        examined = sorted(names)[:MAX_KEYS]
        lifetimes = {name: find_lifetime(name) for name in examined}
        unowned = [name for name in examined if lifetimes[name] != "stays"]
        ttls = self._redis.perform_all([health_calls.get_ttl(name) for name in unowned])
        lasting = [name for name, ttl in zip(unowned, ttls, strict=True) if ttl == -1]
        return broker_diagnosis.diagnose_keys(
            len(examined),
            not cursor and len(examined) == len(names),
            [name for name in lasting if lifetimes[name] is None],
            [name for name in lasting if lifetimes[name] == "expires"],
            mistyped=self._find_mistyped({*examined, *list_shared_keys(self._keys)}),
            unreadable=self._find_unreadable_overrides(),
        )

    def _find_mistyped(self, names: Collection[str]) -> list[str]:
        """Return the keys whose type is not the one that celery5 gives them, each with both types."""
        types_by_name = {name: types for name in sorted(names) if (types := find_types(name))}
        found = self._redis.perform_all([health_calls.get_type(name) for name in types_by_name])
        return [
            f"{name} is a {kind} instead of a {' or '.join(sorted(types))}"
            for (name, types), kind in zip(types_by_name.items(), found, strict=True)
            if kind not in ("none", *types)
        ]

    def _find_unreadable_overrides(self) -> Sequence[str]:
        """Return the tasks whose limit or suspension that somebody has set cannot be read, and so does not hold."""
        try:
            return self._redis.perform(limits.list_overrides(self._keys)).unreadable
        except BrokerReplied:  # a key of another type
            return ()

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def _get_info(self) -> dict[str, str]:
        if self._info is None:
            self._info = self._perform_if_permitted(health_calls.get_server_info()) or {}
        return self._info

    def _get_config(self) -> dict[str, str] | None:
        """Return the parameters; None where they cannot be read, as with most hosted servers."""
        if self._config is None:
            values = {
                name: self._perform_if_permitted(health_calls.get_parameter(name))
                for name in health_calls.PARAMETERS
            }
            self._config = {name: value for name, value in values.items() if value is not None}
        return self._config or None

    def _perform_if_permitted(self, call: Call[T]) -> T | None:
        try:
            return self._redis.perform(call)
        except (BrokerDenied, BrokerReplied):
            return None
