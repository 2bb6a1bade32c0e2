"""Checks: the health checks that celery5 brings along: broker, loop, memory, disk, queue, HTTP endpoint."""

import http.client
import os
import shutil
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from celery5.broker.calls import jobs
from celery5.errors import BrokerError, Misconfigured
from celery5.health.health_check import CheckContext, CheckFunction, HealthCheck
from celery5.health.machine import MEMINFO, available_memory, used_memory
from celery5.protocol.health.readings import (
    HTTP_STATES,
    EndpointResponse,
    get_endpoint_states,
    get_worst_state,
    grade_free_space,
    grade_usage,
)

if TYPE_CHECKING:
    from celery5.boot_step import BootStep
    from celery5.config.settings import Settings
    from celery5.health.event_loop import LoopBlock
    from celery5.health.health_check import DeclareCheck


def request_options(url: str, limit: float, cafile: str | None) -> EndpointResponse:
    """One request, in a thread; each step of it has what is left of `limit` seconds."""
    began = time.monotonic()
    parts = urlsplit(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection: http.client.HTTPConnection | None = None
    try:
        connection = _connection(parts.scheme, parts.hostname or "", parts.port, limit, cafile)
        connection.request("OPTIONS", path, headers={"User-Agent": "celery5", "Connection": "close"})
        if connection.sock is not None:
            connection.sock.settimeout(max(limit - (time.monotonic() - began), 0.001))
        response = connection.getresponse()
        return EndpointResponse(
            status=response.status,
            seconds=time.monotonic() - began,
            allow=response.getheader("Allow"),
            accept=response.getheader("Accept"),
        )
    except (ssl.SSLError, ssl.CertificateError) as error:
        if isinstance(error, TimeoutError):
            return EndpointResponse(seconds=time.monotonic() - began, why="no answer in time")
        return EndpointResponse(seconds=time.monotonic() - began, is_insecure=True, why=f"TLS: {error}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return EndpointResponse(seconds=time.monotonic() - began, why=f"{type(error).__name__}: {error}")
    finally:
        if connection is not None:
            connection.close()


def _connection(
    scheme: str, host: str, port: int | None, limit: float, cafile: str | None
) -> http.client.HTTPConnection:
    if scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=limit)
    return http.client.HTTPSConnection(
        host, port, timeout=limit, context=ssl.create_default_context(cafile=cafile)
    )


MiB = 2**20
SLEEP = 0.1
"""Seconds that a look at the event loop sleeps at a time."""
SLEEPS = 10
"""How often it does: what blocks the loop in that second is seen."""


class BrokerPing(HealthCheck):
    """Whether Redis answers within `limit` seconds. Unhealthy: not in time, or not at all; degraded: almost too
    late."""

    def __init__(
        self, name: str = "broker", *, limit: float = 1.0, period: float = 30.0, **more: Any
    ) -> None:
        more.setdefault("timeout", max(2 * limit, 1.0))
        super().__init__(name, period=period, **more)
        self._most = _above_zero(limit, name)

    async def run_check(self, function: CheckFunction | None, context: CheckContext) -> object:
        """One ping."""
        import trio

        began = trio.current_time()
        with trio.move_on_after(self._most):
            try:
                await context.perform(jobs.PING)
            except BrokerError as error:
                self.why: str = str(error)
                return "unhealthy"
        took = trio.current_time() - began
        self.why = f"an answer of Redis took {took:.3g} s or longer; the limit is {self._most:g} s"
        return grade_usage(took, self._most)


class EventLoopLag(HealthCheck):
    """Whether the worker's event loop comes round within `limit` seconds: jobs that block it show here."""

    def __init__(
        self, name: str = "event-loop", *, limit: float = 1.0, period: float = 10.0, **more: Any
    ) -> None:
        # Its limit is not the look's: one that is cancelled has seen nothing.
        more.setdefault("timeout", 3600.0)
        super().__init__(name, period=period, **more)
        self._most = _above_zero(limit, name)

    async def run_check(self, function: CheckFunction | None, context: CheckContext) -> object:
        """How much later than asked for some short sleeps end, at worst."""
        from celery5.health.event_loop import measure_lateness

        lag = 0.0
        for _ in range(SLEEPS):
            lag = max(lag, await measure_lateness(SLEEP))
            if lag >= self._most:
                break
        self.why: str = f"the event loop was {lag:.3g} s late; the limit is {self._most:g} s"
        return grade_usage(lag, self._most)

    def get_state_after(self, block: "LoopBlock") -> str:
        """Return the state that follows from a block of the loop."""
        return grade_usage(block.seconds, self._most)


class Memory(HealthCheck):
    """Whether the machine has `needed` bytes of memory available, to a container or unit with a limit within it,
    and this process uses less than `limit` bytes, where that is given. Linux."""

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
        self._most = None if limit is None else _above_zero(limit, name)

    async def run_check(self, function: CheckFunction | None, context: CheckContext) -> object:
        """Some small files that the kernel writes."""
        available, used = available_memory(), used_memory()
        self.why: str = f"{_mib(available)} of memory are available, {_mib(self._needed)} are needed"
        seen = [grade_free_space(available, self._needed)]
        if self._most is None:
            return seen
        self.why += f"; this process has {_mib(used)}, its limit is {_mib(self._most)}"
        return [*seen, grade_usage(used, self._most)]


class Disk(HealthCheck):
    """Whether `needed` bytes are free where `path` is."""

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
    """Whether fewer than `limit` jobs wait on the queue `queue` of the application."""

    def __init__(self, queue: str, *, limit: int, name: str = "", **more: Any) -> None:
        super().__init__(name or f"queue:{queue}", **more)
        self._queue = queue
        self._most = _above_zero(limit, self.name)

    async def run_check(self, function: CheckFunction | None, context: CheckContext) -> object:
        """One short question."""
        size = await context.perform(jobs.measure_queue(context.get_queue_keys(self._queue)))
        waiting = max(size.stream - size.in_workers, 0)
        self.why: str = f"{waiting} jobs wait on queue {self._queue}; the limit is {self._most}"
        return grade_usage(waiting, self._most)


class BacklogSize(Protocol):
    """A Messages Backlog: `app.backlog`, or one that the user wrote."""

    @property
    def size(self) -> int:
        """Return how many messages wait."""
        ...


class UnpublishedMessages(HealthCheck):
    """Check whether fewer than `limit` messages wait in a Messages Backlog: this process has sent them, and Redis has
    not received them.

    Args:
        backlog: the backlog: `app.backlog`.
        limit: number of messages from which the state is unhealthy; from 80 % of it, degraded.
    """

    def __init__(self, backlog: BacklogSize, *, limit: int, name: str = "backlog", **more: Any) -> None:
        super().__init__(name, **more)
        self._backlog = backlog
        self._most = _above_zero(limit, name)

    async def run_check(self, function: CheckFunction | None, context: CheckContext) -> object:
        """Compare one number of this process' memory."""
        size = self._backlog.size
        self.why: str = f"{size} messages wait that Redis has not got; the limit is {self._most}"
        return grade_usage(size, self._most)


class HttpEndpoint(HealthCheck):
    """Whether an HTTP endpoint is fit to be called: asks it with an OPTIONS request.

    `url`: http or https. `method` and `content_type`: those of the calls to come. `limit`: seconds that an answer may
    take, the lookup of its name included. `is_secure`: a function that says whether the network is secure, an intrusion
    detection system's word. `cafile`: a file of certificates to trust instead of the system's.

    States: `insecure` (TLS, or `is_secure` says no), `permanently-unavailable` (404, or the method or the content
    type is not allowed), `unhealthy` (500, or no answer in time), `degraded` (not 2xx, or 80 % of the limit),
    `healthy`. The first of them that holds counts. Raises Misconfigured.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "",
        method: str = "GET",
        content_type: str | None = None,
        limit: float = 5.0,
        is_secure: Callable[[], bool] | None = None,
        cafile: str | os.PathLike[str] | None = None,
        **more: Any,
    ) -> None:
        scheme, _, rest = url.partition("://")
        if scheme not in ("http", "https") or not rest or any(each.isspace() for each in url):
            raise Misconfigured(f"health check of {url!r}: give a URL that begins with http:// or https://")
        if "states" in more:
            raise Misconfigured(f"health check of {url!r}: an HttpEndpoint sets its states itself")
        more.setdefault("timeout", 2 * limit + 1)
        super().__init__(name or _host(rest), states=HTTP_STATES, **more)
        self.url: str = url
        self.method: str = method
        self.content_type: str | None = content_type
        self.limit: float = _above_zero(limit, self.name)
        self._is_secure = is_secure
        self._cafile = None if cafile is None else str(cafile)
        self._is_compromised = False

    async def run_check(self, function: CheckFunction | None, context: CheckContext) -> object:
        """One OPTIONS request, in a thread."""
        import trio

        answer = EndpointResponse(seconds=self.limit, why="no answer in time")
        with trio.move_on_after(self.limit):
            answer = await trio.to_thread.run_sync(
                self._asked, abandon_on_cancel=True, limiter=self._limiter()
            )
        states = self._states_of(answer, is_call=False)
        said = f"the answer was {answer.status}, after {answer.seconds:.3g} s; the limit is {self.limit:g} s"
        self.why: str = "the network is not secure" if self._is_compromised else answer.why or said
        return states

    def _asked(self) -> EndpointResponse:
        """The request, and what the intrusion detection says, in a thread: both may take a while."""
        # MOVED

        self._is_compromised = self._is_secure is not None and not self._is_secure()
        return request_options(self.url, self.limit, self._cafile)

    def saw(self, *, status: int = 0, seconds: float = 0.0, is_insecure: bool = False, why: str = "") -> str:
        """Feed it with a call that a task has made itself: the status of the answer (0: none came), the seconds
        that it took, and whether TLS failed. The call must stand in the same conditions; gives the state, which is
        reported."""
        answer = EndpointResponse(status=status, seconds=seconds, is_insecure=is_insecure, why=why)
        state = get_worst_state(self._states_of(answer, is_call=True), self.states) or self.good_state
        self.report(state, why or (f"answered {status}" if status else "no answer"))
        return state

    def _states_of(self, answer: EndpointResponse, *, is_call: bool) -> list[str]:
        found = get_endpoint_states(
            answer, method=self.method, content_type=self.content_type, limit=self.limit, is_call=is_call
        )
        return ["insecure", *found] if self._is_compromised else found


def make_own_checks() -> list[HealthCheck]:
    """What a worker looks at of itself, unless the setting `own_checks` says no."""
    memory = [Memory()] if os.path.exists(MEMINFO) else []
    return [BrokerPing(), EventLoopLag(), *memory, Disk()]


class CheckedTask(Protocol):
    """A task, as far as it has health checks."""

    checks: tuple[HealthCheck, ...]

    @property
    def name(self) -> str:
        """Its name."""
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
    def bootsteps(self) -> "Sequence[BootStep]":
        """Its boot steps and services."""
        ...


def get_all_checks(app: CheckedApplication) -> dict[str, HealthCheck]:
    """The checks of an application, of its tasks and services, and the worker's own, unless one of theirs has the name.
    Raises Misconfigured when two of theirs have one name."""
    found = dict(app.health_check.known)
    owners = [(f"task {task.name}", task.checks) for task in app.tasks.values()]
    owners += [(f"service {step.name}", tuple(step.checks)) for step in app.bootsteps]
    for owner, checks in owners:
        for check in checks:
            if found.setdefault(check.name, check) is not check:
                raise Misconfigured(f"two health checks are named {check.name!r}: one of them is {owner}'s")
    own = make_own_checks() if app.settings.own_checks else []
    return {check.name: check for check in own} | found


def _above_zero(limit: float, name: str) -> float:
    if not limit > 0:
        raise Misconfigured(f"health check {name}: limit is {limit!r}: give more than 0")
    return limit


def _mib(size: float) -> str:
    return f"{size / MiB:,.0f} MiB"


def _host(rest: str) -> str:
    return rest.partition("/")[0].rpartition("@")[2]
