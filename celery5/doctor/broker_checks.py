"""Broker checks: what `celery5 doctor` looks at in the broker; `protocol/health/broker_diagnosis.py` says what it
means."""

import time
from typing import TypeVar

from celery5.broker.call import Call
from celery5.broker.calls import health as health_calls
from celery5.broker.calls import jobs
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import Keys, is_owned
from celery5.broker.timing import Timing
from celery5.errors import BrokerDenied, BrokerError, BrokerReplied
from celery5.protocol.health import broker_diagnosis
from celery5.protocol.health.broker_diagnosis import Finding
from celery5.protocol.job.job import new_id

T = TypeVar("T")

CHECK_TIMING = Timing(connect=3.0, reply=5.0)
PINGS = 20
TRIPS = 5
"""Looks at the clock; the quickest counts, since it is the surest."""
MOST_KEYS = 2000
SCANNED = 1000
"""Keys that the server goes through for one trip."""
SCANS = 50
"""Trips at most: of a large keyspace a part is looked at."""


class BrokerChecks:
    """The checks of one broker, for one application."""

    def __init__(self, endpoint: Endpoint, keys: Keys, queue: str) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._queue = queue
        self._redis = BlockingRedis(endpoint, timing=CHECK_TIMING, max_connections=4)
        self._info: dict[str, str] | None = None
        self._config: dict[str, str] | None = None
        self.is_away = False

    def check_server(self) -> Finding:
        """Whether it answers, and what it is. When it does not, nothing else is looked at there."""
        try:
            self._redis.perform(jobs.PING)
        except BrokerError:
            self.is_away = True
            raise
        return broker_diagnosis.diagnose_server(self._said())

    def check_persistence(self) -> Finding:
        """Whether jobs outlive it."""
        return broker_diagnosis.diagnose_persistence(self._said(), self._set())

    def check_memory(self) -> Finding:
        """What it does when its memory is full."""
        return broker_diagnosis.diagnose_eviction(self._said(), self._set())

    def check_clock(self) -> Finding:
        """How far its clock and ours are apart."""
        best = (float("inf"), 0.0)
        for _ in range(TRIPS):
            begun = time.time()
            theirs = self._redis.perform(health_calls.get_server_time())
            took = time.time() - begun
            best = min(best, (took, theirs - (begun + took / 2)))
        took, ahead = best
        return broker_diagnosis.diagnose_clock(ahead, took / 2)

    def check_latency(self) -> Finding:
        """How long it takes to answer."""
        pings: list[float] = []
        for _ in range(PINGS):
            begun = time.perf_counter()
            self._redis.perform(jobs.PING)
            pings.append(time.perf_counter() - begun)
        return broker_diagnosis.diagnose_latency(pings)

    def check_permissions(self) -> Finding:
        """Whether we may do there what we do."""
        user, own = self._endpoint.username or "", new_id()
        places = (self._keys.reply(own), self._keys.for_queue(self._queue).result(own))
        try:
            here, there = self._redis.perform_all(
                [health_calls.probe_permissions(each, each) for each in places]
            )
        except BrokerDenied as error:
            return broker_diagnosis.diagnose_permissions(user, 1, {"EVALSHA": str(error)})
        refused = {**here.refused, **there.refused}
        try:
            self._redis.perform(health_calls.probe_unblock())
        except BrokerDenied as error:
            refused["CLIENT|UNBLOCK"] = str(error)
        if listening := health_calls.probe_subscribe(self._endpoint, places[0], CHECK_TIMING):
            refused["SUBSCRIBE"] = listening
        return broker_diagnosis.diagnose_permissions(user, here.tried + 3, refused)

    def check_keys(self) -> Finding:
        """Whether keys stay there that nobody owns: of some, if there are many."""
        names, cursor, trips = list[str](), 0, 0
        while True:
            cursor, some = self._redis.perform(
                health_calls.scan_keys(cursor, self._keys.pattern, count=SCANNED)
            )
            names += [each for each in some if self._keys.owns(each)]
            trips += 1
            if not cursor or len(names) >= MOST_KEYS or trips == SCANS:
                break
        looked = sorted(set(names))[:MOST_KEYS]
        strange = [each for each in looked if not is_owned(each)]
        lives = self._redis.perform_all([health_calls.get_ttl(each) for each in strange])
        orphans = [name for name, life in zip(strange, lives, strict=True) if life == -1]
        return broker_diagnosis.diagnose_keys(
            len(looked), not cursor and len(looked) == len(set(names)), orphans
        )

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def _said(self) -> dict[str, str]:
        if self._info is None:
            self._info = self._permitted(health_calls.get_server_info()) or {}
        return self._info

    def _set(self) -> dict[str, str] | None:
        """The parameters; None where they cannot be read, as at most of those who sell servers."""
        if self._config is None:
            found = {
                name: self._permitted(health_calls.get_parameter(name)) for name in health_calls.PARAMETERS
            }
            self._config = {name: value for name, value in found.items() if value is not None}
        return self._config or None

    def _permitted(self, call: Call[T]) -> T | None:
        try:
            return self._redis.perform(call)
        except (BrokerDenied, BrokerReplied):
            return None
