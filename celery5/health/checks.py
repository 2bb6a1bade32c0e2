"""Define the built-in health checks: broker, event loop, memory, disk, queue, backlog, HTTP endpoint."""

import ipaddress
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

from msgspec.structs import replace

from celery5.broker.calls import jobs, queues
from celery5.broker.calls.health import get_memory_info
from celery5.errors import BrokerDenied, BrokerError, BrokerReplied, Misconfigured
from celery5.health import http_requests
from celery5.health.health_check import CheckContext, CheckFunction, HealthCheck
from celery5.health.machine import MEMINFO, available_memory, used_memory
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.counts import format_count
from celery5.protocol.health.readings import (
    HTTP_STATES,
    EndpointResponse,
    get_endpoint_states,
    get_worst_state,
    grade_free_space,
    grade_usage,
)
from celery5.protocol.health.server_memory import ServerMemory, read_server_memory

T = TypeVar("T")

if TYPE_CHECKING:
    from celery5.config.settings import Settings
    from celery5.health.event_loop import LoopBlock
    from celery5.health.health_check import DeclareCheck


MiB = 2**20
SLEEP = 0.1
"""Seconds of one sleep of a check of the event loop."""
RECHECK_PERIOD = 4.0
"""Seconds, at most, after which a worker asks Redis again that did not answer: it is ready soon after an outage."""
SLEEPS = 10
"""Sleeps of one check: whatever blocks the loop in that second is seen."""


class BrokerPing(HealthCheck):
    """Check that Redis answers within `limit` seconds: degraded from 80 % of them, unhealthy after them.

    It is unhealthy, too, while its memory is full, so that it refuses writes. While it is not healthy, it is checked
    every four seconds.
    """

    def __init__(
        self, name: str = "broker", *, limit: float = 1.0, period: float = 30.0, **more: Any
    ) -> None:
        more.setdefault("timeout", max(2 * limit, 1.0))
        super().__init__(name, period=period, **more)
        self._limit = _check_positive(limit, name)

    @property
    def recheck_period(self) -> float | None:
        """Return the seconds after which Redis is asked again while it does not answer, or is full."""
        return RECHECK_PERIOD if self.period > RECHECK_PERIOD else None

    async def run_check(self, function: CheckFunction | None, context: CheckContext) -> object:
        """Send one ping, and ask how full memory is."""
        import trio

        start = trio.current_time()
        with trio.move_on_after(self._limit):
            try:
                await context.perform(jobs.PING)
                memory = await _read_memory(context)
                if memory is not None and memory.is_full:
                    self.why: str = f"memory is {memory.describe()}"
                    return "unhealthy"
            except BrokerError as error:
                self.why = str(error)
                return "unhealthy"
        seconds = trio.current_time() - start
        self.why = f"an answer of Redis took {seconds:.3g} s or longer; the limit is {self._limit:g} s"
        return grade_usage(seconds, self._limit)


async def _read_memory(context: CheckContext) -> ServerMemory | None:
    """Return how full the server is; None where it does not say, or not to this user."""
    try:
        info: dict[str, str] = await context.perform(get_memory_info())
    except (BrokerDenied, BrokerReplied):
        return None
    return read_server_memory(DEFAULT_BROKER, info)


class EventLoopLag(HealthCheck):
    """Check that the worker's event loop is never late by `limit` seconds, which a job causes that blocks it."""

    def __init__(
        self, name: str = "event-loop", *, limit: float = 1.0, period: float = 10.0, **more: Any
    ) -> None:
        # A check that times out would have seen nothing, so it has no timeout of its own.
        more.setdefault("timeout", 3600.0)
        super().__init__(name, period=period, **more)
        self._limit = _check_positive(limit, name)

    async def run_check(self, function: CheckFunction | None, context: CheckContext) -> object:
        """Measure by how much short sleeps end late, at worst."""
        from celery5.health.event_loop import measure_lateness

        lag = 0.0
        for _ in range(SLEEPS):
            lag = max(lag, await measure_lateness(SLEEP))
            if lag >= self._limit:
                break
        self.why: str = f"the event loop was {lag:.3g} s late; the limit is {self._limit:g} s"
        return grade_usage(lag, self._limit)

    def get_state_after(self, block: "LoopBlock") -> str:
        """Return the state that follows from a block of the loop."""
        return grade_usage(block.seconds, self._limit)


class Memory(HealthCheck):
    """Check that `needed` bytes of memory are available, and that this process uses less than `limit`. Linux only.

    A limit of the container or the systemd unit counts, too.
    """

    def __init__(
        self,
        name: str = "memory",
        *,
        needed: float = 64 * MiB,
        limit: float | None = None,
        period: float = 30.0,
        **more: Any,
    ) -> None:
        super().__init__(name, period=period, **more)
        self._needed = needed
        self._limit = None if limit is None else _check_positive(limit, name)

    async def run_check(self, function: CheckFunction | None, context: CheckContext) -> object:
        """Read some small files of the kernel."""
        available, used = available_memory(), used_memory()
        self.why: str = f"{_mib(available)} of memory are available, {_mib(self._needed)} are needed"
        states = [grade_free_space(available, self._needed)]
        if self._limit is None:
            return states
        self.why += f"; this process has {_mib(used)}, its limit is {_mib(self._limit)}"
        return [*states, grade_usage(used, self._limit)]


class Disk(HealthCheck):
    """Check that `needed` bytes are free on the disk of `path`."""

    def __init__(
        self,
        name: str = "disk",
        *,
        path: str | os.PathLike[str] = "/",
        needed: float = 64 * MiB,
        period: float = 30.0,
        **more: Any,
    ) -> None:
        def look() -> str:
            free = shutil.disk_usage(path).free
            self.why = f"{_mib(free)} are free on the disk of {os.fspath(path)}, {_mib(needed)} are needed"
            return grade_free_space(free, needed)

        super().__init__(name, look, period=period, **more)


class QueueLength(HealthCheck):
    """Check that fewer than `limit` jobs wait on the queue `queue` of the application."""

    def __init__(self, queue: str, *, limit: int, name: str = "", **more: Any) -> None:
        super().__init__(name or f"queue:{queue}", **more)
        self._queue = queue
        self._limit = _check_positive(limit, self.name)

    async def run_check(self, function: CheckFunction | None, context: CheckContext) -> object:
        """Read the length of the queue."""
        depth = await context.perform(queues.get_queue_depth(context.get_queue_keys(self._queue)))
        waiting = depth.backlog
        jobs_wait = format_count(waiting, "job waits", "jobs wait")
        self.why: str = f"{jobs_wait} on queue {self._queue}; the limit is {self._limit}"
        return grade_usage(waiting, self._limit)


class BacklogSize(Protocol):
    """A Messages Backlog: `app.backlog`, or one that a user wrote."""

    @property
    def size(self) -> int:
        """Return how many messages wait."""
        ...


class UnpublishedMessages(HealthCheck):
    """Check that fewer than `limit` messages of this process wait in a Messages Backlog for Redis.

    From `limit` on it is unhealthy, from 80 % of it degraded. `backlog` is usually `app.backlog`.
    """

    def __init__(self, backlog: BacklogSize, *, limit: int, name: str = "backlog", **more: Any) -> None:
        super().__init__(name, **more)
        self._backlog = backlog
        self._limit = _check_positive(limit, name)

    async def run_check(self, function: CheckFunction | None, context: CheckContext) -> object:
        """Compare the size of the backlog with the limit."""
        size = self._backlog.size
        messages_wait = format_count(size, "message waits", "messages wait")
        self.why: str = f"{messages_wait} that Redis has not got; the limit is {self._limit}"
        return grade_usage(size, self._limit)


class HttpEndpoint(HealthCheck):
    """Check by an OPTIONS request that an HTTP endpoint can be called.

    Its states are `insecure` (TLS failed, or `is_secure` returned False), `permanently-unavailable` (404, or the method
    or the content type is not allowed), `unhealthy` (500, or no answer in time), `degraded` (not 2xx, or 80 % of the
    limit) and `healthy`. The first of them that holds counts.

    Args:
        url: An http or https URL.
        method: The method of the calls that tasks make.
        content_type: The content type of these calls.
        limit: Seconds that an answer may take, with the lookup of the host's name.
        dns_limit: Seconds that this lookup may take; by default `limit`.
        addresses: The addresses or networks that the name may resolve to (`10.0.0.0/8`); none: any.
        is_secure: Returns whether the network is secure, for example by an intrusion detection system.
        cafile: A file of certificates to trust instead of the system's.

    Raises:
        Misconfigured: An argument makes no sense.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "",
        method: str = "GET",
        content_type: str | None = None,
        limit: float = 5.0,
        dns_limit: float | None = None,
        addresses: Sequence[str] = (),
        is_secure: Callable[[], bool] | None = None,
        cafile: str | os.PathLike[str] | None = None,
        **more: Any,
    ) -> None:
        scheme, _, rest = url.partition("://")
        if scheme not in ("http", "https") or not rest or any(character.isspace() for character in url):
            raise Misconfigured(f"health check of {url!r}: give a URL that begins with http:// or https://")
        if "states" in more:
            raise Misconfigured(f"health check of {url!r}: an HttpEndpoint sets its states itself")
        more.setdefault("timeout", 2 * limit + 1)
        super().__init__(name or _host(rest), states=HTTP_STATES, **more)
        self.url: str = url
        self.method: str = method
        self.content_type: str | None = content_type
        self.limit: float = _check_positive(limit, self.name)
        self.dns_limit: float = limit if dns_limit is None else _check_positive(dns_limit, self.name)
        self._networks = _parse_networks(addresses, self.name)
        self._is_secure = is_secure
        self._cafile = None if cafile is None else str(cafile)
        self._is_compromised = False

    async def run_check(self, function: CheckFunction | None, context: CheckContext) -> object:
        """Resolve the host's name and send one OPTIONS request, in a thread."""
        import trio

        deadline = trio.current_time() + self.limit
        answer = EndpointResponse(seconds=self.limit, why="no answer in time")
        with trio.CancelScope(deadline=deadline) as security:
            if self._is_secure is not None:
                self._is_compromised = not await self._in_thread(self._is_secure)
        if not security.cancelled_caught:
            start = trio.current_time()
            addresses, failure = await self._resolve(deadline - start)
            seconds = trio.current_time() - start
            if not addresses:
                answer = EndpointResponse(seconds=seconds, why=failure)
            else:
                request = partial(
                    http_requests.request_options, self.url, self.limit - seconds, self._cafile, addresses
                )
                with trio.CancelScope(deadline=deadline):
                    response = await self._in_thread(request)
                    answer = replace(response, seconds=response.seconds + seconds)
        states = self._states_of(answer, is_call=False)
        summary = (
            f"the answer was {answer.status}, after {answer.seconds:.3g} s; the limit is {self.limit:g} s"
        )
        self.why: str = "the network is not secure" if self._is_compromised else answer.why or summary
        return states

    async def _resolve(self, left: float) -> tuple[list[str], str]:
        """Return the addresses to connect to, or none and why.

        Its limit is not nested in that of the whole check: of two that end together Trio reports the outer one, and
        the reason would not be DNS.
        """
        import trio

        host, limit = urlsplit(self.url).hostname, min(self.dns_limit, left)
        with trio.move_on_after(limit):
            try:
                addresses = await self._in_thread(partial(http_requests.resolve_host, self.url))
            except (OSError, UnicodeError) as error:
                return [], f"DNS: {host} cannot be resolved: {error}"
            wrong = [address for address in addresses if not self._allows_address(address)]
            if wrong:
                return [], f"DNS: {host} resolves to {wrong[0]}, which is not among its addresses"
            return addresses, f"DNS: {host} has no address"
        return [], f"DNS: {host} was not resolved within {limit:.3g} s"

    def _allows_address(self, address: str) -> bool:
        ip = ipaddress.ip_address(address.partition("%")[0])
        return not self._networks or any(ip in network for network in self._networks)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        from celery5.runners.user_errors import call_in_thread  # needs Trio, which few producers do

        return await call_in_thread(function, limiter=self._limiter())

    def saw(self, *, status: int = 0, seconds: float = 0.0, is_insecure: bool = False, why: str = "") -> str:
        """Report the outcome of a call that a task has made itself; return the state that follows from it.

        The call must have the same URL, method and content type.

        Args:
            status: The status of the answer; 0 for none.
            seconds: How long it took.
            is_insecure: Whether TLS failed.
            why: The error in words; by default the status.
        """
        answer = EndpointResponse(status=status, seconds=seconds, is_insecure=is_insecure, why=why)
        state = get_worst_state(self._states_of(answer, is_call=True), self.states) or self.good_state
        self.report(state, why or (f"answered {status}" if status else "no answer"))
        return state

    def _states_of(self, answer: EndpointResponse, *, is_call: bool) -> list[str]:
        states = get_endpoint_states(
            answer, method=self.method, content_type=self.content_type, limit=self.limit, is_call=is_call
        )
        return ["insecure", *states] if self._is_compromised else states


def make_own_checks() -> list[HealthCheck]:
    """Return the checks that a worker has of its own, unless the setting `own_checks` is False."""
    memory = [Memory()] if os.path.exists(MEMINFO) else []
    return [BrokerPing(), EventLoopLag(), *memory, Disk()]


class CheckedTask(Protocol):
    """A task, as far as it has health checks."""

    checks: tuple[HealthCheck, ...]

    @property
    def name(self) -> str:
        """Its name."""
        ...


class CheckedStep(Protocol):
    """A boot step or service, as far as it has health checks."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def checks(self) -> Sequence[HealthCheck]:
        """The checks that trip its circuit breaker."""
        ...


class CheckedApplication(Protocol):
    """The application whose health is checked."""

    @property
    def settings(self) -> "Settings":
        """Its settings."""
        ...

    @property
    def health_check(self) -> "DeclareCheck":
        """The checks that it declares."""
        ...

    @property
    def tasks(self) -> Mapping[str, CheckedTask]:
        """Its tasks, by name."""
        ...

    @property
    def bootsteps(self) -> Sequence[CheckedStep]:
        """Its boot steps and services."""
        ...


def get_all_checks(app: CheckedApplication) -> dict[str, HealthCheck]:
    """Return the checks of an application, of its tasks and services, and those of a worker, by name.

    A worker's own check gives way to one of the same name. Raises Misconfigured when two others have the same name.
    """
    declared = dict(app.health_check.known)
    owners = [(f"task {task.name}", task.checks) for task in app.tasks.values()]
    owners += [(f"service {step.name}", tuple(step.checks)) for step in app.bootsteps]
    for owner, checks in owners:
        for check in checks:
            if declared.setdefault(check.name, check) is not check:
                raise Misconfigured(f"two health checks are named {check.name!r}: one of them is {owner}'s")
    own = make_own_checks() if app.settings.own_checks else []
    return {check.name: check for check in own} | declared


def _check_positive(limit: float, name: str) -> float:
    if not limit > 0:
        raise Misconfigured(f"health check {name}: limit is {limit!r}: give more than 0")
    return limit


def _parse_networks(
    addresses: Sequence[str], name: str
) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    if isinstance(addresses, str):
        addresses = (addresses,)
    try:
        return [ipaddress.ip_network(address) for address in addresses]
    except ValueError as error:
        raise Misconfigured(
            f"health check {name}: addresses: {error}; give IP addresses or networks, as 10.0.0.0/8"
        ) from None


def _mib(size: float) -> str:
    return f"{size / MiB:,.0f} MiB"


def _host(rest: str) -> str:
    return rest.partition("/")[0].rpartition("@")[2]
