"""Cluster: real processes on a real Redis of their own, each behind its own proxy, and what may be done to them."""

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import redis
import trio

from celery5.broker.servers.embedded import EmbeddedServer
from tests.access import Access, list_denied
from tests.faults.connections.proxy import FaultyProxy
from tests.faults.nemesis.schedule import (
    FLAP_DOWN,
    FLAP_UP,
    FLAPS,
    MEMBERS,
    PRODUCERS,
    ROUTERS,
    WORKERS,
    Fault,
)
from tests.faults.nemesis.verdict import Life, Record, Struck
from tests.redis.commands.staff import Employee, Staff, logged

TARGET = ("-m", "celery5", "-A", "tests.faults.nemesis.application:app")
RESTART = 0.2
"""Seconds until a process that has ended is started again."""
TRIES = 20
"""Attempts to reach Redis past the proxies, of half a second each."""
STOP_LIMIT = 30.0
"""Seconds that a process may take to stop in order."""


class Cluster:
    """Three workers, two Routers, two Schedulers and the proxies before them."""

    def __init__(
        self, server: EmbeddedServer | None, staff: Staff, record: Record, access: Access | None
    ) -> None:
        self._server = server
        self.access = access
        self.staff = staff
        self.record = record
        self.proxies = {
            name: FaultyProxy(str(server.socket), tls=access.make_proxy_context() if access else None)
            for name in (*MEMBERS, *PRODUCERS)
            if server is not None
        }
        self.stopping = False
        self._running: dict[str, Employee] = {}
        # How many faults hold somebody in a state, by the name of that and of the state.
        self._holds: Counter[tuple[str, str]] = Counter()
        self._reviving = trio.Lock()

    @property
    def server(self) -> EmbeddedServer:
        """The one server."""
        assert self._server is not None
        return self._server

    def find_url(self, name: str) -> str:
        """Return the broker URL of a member or a producer."""
        return self.secure(self.proxies[name].url, kind_of(name))

    def secure(self, url: str, role: str) -> str:
        """Return a URL for the user of a role, if there are users."""
        return self.access.make_url(url, role) if self.access else url

    def list_denied(self) -> list[str]:
        """Return what was denied to these users."""
        with redis.Redis.from_url(self.server.url, decode_responses=True) as client:
            return list_denied([client])

    # ---- processes

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Keep all of it up, until cancelled; what is still there then is killed."""
        try:
            async with trio.open_nursery() as nursery:
                for proxy in self.proxies.values():
                    await nursery.start(proxy.run)
                for name in MEMBERS:
                    nursery.start_soon(self._keep, name)
                while len(self.ready()) < len(MEMBERS):
                    await trio.sleep(0.02)
                task_status.started()
        finally:
            for process in self._running.values():
                if process.process.poll() is None:
                    process.signal(signal.SIGKILL)
                    process.wait()

    def ready(self) -> list[Life]:
        """Return the processes that run and have come up."""
        return [process for process in self._living() if self._is_ready(process)]

    def _living(self) -> list[Life]:
        return [life for life in self.record.lives if life.ended is None]

    def _is_ready(self, life: Life) -> bool:
        kind = kind_of(life.name)
        life.ready = life.ready or bool(logged(self._running[life.name].output, f"{kind}:started"))
        return life.ready

    async def _keep(self, name: str) -> None:
        """Start a member, and start it again whenever it has ended."""
        while True:
            one = self._launch(name)
            life = Life(name, one.process.pid, time.monotonic())
            self._running[name] = one
            self.record.lives.append(life)
            while one.process.poll() is None:
                await trio.sleep(0.02)
            life.ready = life.ready or bool(logged(one.output, f"{kind_of(name)}:started"))
            life.code, life.ended = one.process.returncode, time.monotonic()
            if self.stopping:
                return
            await trio.sleep(RESTART)

    def _launch(self, name: str) -> Employee:
        command = [sys.executable, *TARGET, kind_of(name), "start", "--name", name]
        return self.staff.launch(
            command,
            broker=self.find_url(name),
            lease=self.record.lease,
            cpu_slots=4,
            concurrency=20,
            grace_period=5,
        )

    async def stop(self, *names: str) -> None:
        """Stop members in order, and wait for that."""
        self.stopping = True
        for name in names:
            self._running[name].signal(signal.SIGTERM)
        with trio.move_on_after(STOP_LIMIT):
            while any(process.name in names for process in self._living()):
                await trio.sleep(0.02)

    def sidecar(self, name: str) -> int:
        """Return the process id of the sidecar of a worker, 0 for none."""
        output = str(self._running[name].output)
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended, or is another user's
                if (path / "comm").read_text() == "celery5-sidecar\n" and os.readlink(
                    path / "fd" / "2"
                ) == output:
                    return int(path.name)
        return 0

    # ---- faults

    async def strike(self, fault: Fault) -> None:
        """Do what a fault says, for as long as it says, and undo it."""
        began, pid = time.monotonic(), self._pid(fault.target)
        await FAULTS[fault.kind](self, fault)
        self._note(fault, pid, began, time.monotonic())

    def _pid(self, name: str) -> int:
        return self._running[name].process.pid if name in self._running else 0

    def _note(self, fault: Fault, pid: int, began: float, ended: float) -> None:
        """Record whom it struck: a proxy strikes all processes that were behind it meanwhile."""
        there = [life.pid for life in self.record.lives if life.name == fault.target
                 and life.began <= ended and (life.ended is None or life.ended >= began)]  # fmt: skip
        for victim in {pid, *there}:
            self.record.struck.append(Struck(fault.kind, fault.target, victim, began, ended))
        if fault.kind == "stop while memory is full":
            self.record.struck.append(Struck("fill memory", "redis", 0, began, ended))

    @asynccontextmanager
    async def held(
        self, name: str, state: str, begin: Callable[[], None], end: Callable[[], None]
    ) -> AsyncIterator[None]:
        """Hold somebody in a state; two faults that do so at once end it together."""
        self._holds[name, state] += 1
        begin()
        try:
            yield
        finally:
            self._holds[name, state] -= 1
            if not self._holds[name, state]:
                end()

    def kill(self, name: str) -> None:
        """Kill a member."""
        one = self._running[name]
        if one.process.poll() is None:
            next(life for life in self.record.lives if life.pid == one.process.pid).killed = True
            one.signal(signal.SIGKILL)

    def kill_sidecar(self, name: str) -> None:
        """Kill the sidecar of a worker, if it is there."""
        if pid := self.sidecar(name):
            signal_to(pid, signal.SIGKILL)

    @asynccontextmanager
    async def stopped(self, name: str, *pids: int) -> AsyncIterator[None]:
        """Stop processes with SIGSTOP."""

        def to_all(number: signal.Signals) -> None:
            for pid in pids:
                signal_to(pid, number)

        state = " ".join(map(str, pids))
        async with self.held(name, state, partial(to_all, signal.SIGSTOP), partial(to_all, signal.SIGCONT)):
            yield

    def member_stopped(self, name: str, *, sidecar: bool = False) -> AbstractAsyncContextManager[None]:
        """Stop a member, and its sidecar if that is wanted."""
        return self.stopped(name, self._pid(name), *([self.sidecar(name)] if sidecar else []))

    @asynccontextmanager
    async def slow(self, name: str) -> AsyncIterator[None]:
        """Delay every reply."""
        proxy = self.proxies[name]

        def delayed(seconds: float) -> None:
            proxy.delay = seconds

        async with self.held(name, "slow", partial(delayed, 0.05), partial(delayed, 0.0)):
            yield

    @asynccontextmanager
    async def losing(self, name: str) -> AsyncIterator[None]:
        """Lose the next reply, and do not listen any more."""
        proxy = self.proxies[name]

        def end() -> None:
            proxy.loss = None
            proxy.accept()

        async with self.held(name, "refuse", proxy.lose_reply, end):
            yield

    @asynccontextmanager
    async def redis_down(self) -> AsyncIterator[None]:
        """Kill Redis; what it had promised is in its file."""
        async with self._reviving:
            await trio.to_thread.run_sync(self.server.kill)
            yield
            await trio.to_thread.run_sync(self.server.revive)
            if self._holds["redis", "full"]:
                self.set_memory(1)

    def redis_frozen(self) -> AbstractAsyncContextManager[None]:
        """Stop Redis with SIGSTOP."""
        return self.stopped("redis", self.server.pid)

    @asynccontextmanager
    async def memory_full(self) -> AsyncIterator[None]:
        """Let Redis refuse whatever takes memory."""
        self._holds["redis", "full"] += 1
        await trio.to_thread.run_sync(self.set_memory, 1)
        try:
            yield
        finally:
            self._holds["redis", "full"] -= 1
            if not self._holds["redis", "full"]:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self.set_memory, 0)

    def set_memory(self, most: int) -> None:
        """Set the memory that Redis may use; 0 for no limit. One that is down has none when it comes back."""
        for _ in range(TRIES):
            try:
                with self.client() as client:
                    client.config_set("maxmemory", most)
                return
            except redis.TimeoutError:
                continue  # it is frozen now
            except redis.ConnectionError:
                return

    def pause_redis(self, seconds: float) -> None:
        """Have Redis serve nobody for a while."""
        with suppress(redis.RedisError), self.client() as client:
            client.client_pause(int(seconds * 1000))

    def client(self) -> "redis.Redis":
        """Return what reaches Redis without a proxy."""
        return redis.Redis.from_url(self.server.url, socket_timeout=0.5)

    def count_commands(self) -> int:
        """Return how many commands Redis has carried out, those within scripts included."""
        with self.client() as client:
            stats: Mapping[str, Any] = cast("Any", client).info("commandstats")
        return sum(stat["calls"] for stat in stats.values())

    async def heal(self) -> None:
        """Make sure that nothing is left of any fault, and wait until all members run."""
        for proxy in self.proxies.values():
            proxy.loss, proxy.delay = None, 0.0
            proxy.resume()
            proxy.accept()
        if not self.server.pid:
            await trio.to_thread.run_sync(self.server.revive)
        signal_to(self.server.pid, signal.SIGCONT)
        with self.client() as client:
            client.ping()
            client.config_set("maxmemory", 0)
        self.record.healed = time.monotonic()


def kind_of(name: str) -> str:
    """Return what the command line calls a member; `producer` for a producer."""
    kinds = {"worker": WORKERS, "router": ROUTERS, "producer": PRODUCERS}
    return next((kind for kind, names in kinds.items() if name in names), "scheduler")


def signal_to(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, if there is one."""
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


# ---- each kind of fault


async def _kill(cluster: Cluster, fault: Fault) -> None:
    cluster.kill(fault.target)


async def _kill_with_sidecar(cluster: Cluster, fault: Fault) -> None:
    cluster.kill_sidecar(fault.target)
    cluster.kill(fault.target)


async def _kill_sidecar(cluster: Cluster, fault: Fault) -> None:
    cluster.kill_sidecar(fault.target)


async def _stop(cluster: Cluster, fault: Fault) -> None:
    async with cluster.member_stopped(fault.target):
        await trio.sleep(fault.seconds)


async def _stop_with_sidecar(cluster: Cluster, fault: Fault) -> None:
    async with cluster.member_stopped(fault.target, sidecar=True):
        await trio.sleep(fault.seconds)


async def _stop_sidecar(cluster: Cluster, fault: Fault) -> None:
    async with cluster.stopped(fault.target, cluster.sidecar(fault.target)):
        await trio.sleep(fault.seconds)


async def _partition(cluster: Cluster, fault: Fault) -> None:
    proxy = cluster.proxies[fault.target]
    async with cluster.held(fault.target, "stall", proxy.stall, proxy.resume):
        await trio.sleep(fault.seconds)


async def _refuse(cluster: Cluster, fault: Fault) -> None:
    proxy = cluster.proxies[fault.target]
    async with cluster.held(fault.target, "refuse", proxy.refuse, proxy.accept):
        await trio.sleep(fault.seconds)


async def _cut(cluster: Cluster, fault: Fault) -> None:
    cluster.proxies[fault.target].cut_all()


async def _lose(cluster: Cluster, fault: Fault) -> None:
    async with cluster.losing(fault.target):
        await trio.sleep(fault.seconds)


async def _slow(cluster: Cluster, fault: Fault) -> None:
    async with cluster.slow(fault.target):
        await trio.sleep(fault.seconds)


async def _kill_redis(cluster: Cluster, fault: Fault) -> None:
    async with cluster.redis_down():
        await trio.sleep(fault.seconds)


async def _freeze_redis(cluster: Cluster, fault: Fault) -> None:
    async with cluster.redis_frozen():
        await trio.sleep(fault.seconds)


async def _flap_redis(cluster: Cluster, _fault: Fault) -> None:
    for _ in range(FLAPS):
        async with cluster.redis_frozen():
            await trio.sleep(FLAP_DOWN * cluster.record.lease)
        await trio.sleep(FLAP_UP * cluster.record.lease)


async def _fill(cluster: Cluster, fault: Fault) -> None:
    async with cluster.memory_full():
        await trio.sleep(fault.seconds)


async def _pause(cluster: Cluster, fault: Fault) -> None:
    await trio.to_thread.run_sync(cluster.pause_redis, fault.seconds)
    await trio.sleep(fault.seconds)


async def _stop_while_full(cluster: Cluster, fault: Fault) -> None:
    """It loses its lease, and begins again while Redis still refuses to write."""
    async with cluster.memory_full():
        async with cluster.member_stopped(fault.target):
            await trio.sleep(0.65 * fault.seconds)
        await trio.sleep(0.35 * fault.seconds)


FAULTS: Mapping[str, Callable[[Cluster, Fault], Awaitable[None]]] = {
    "kill": _kill,
    "kill with sidecar": _kill_with_sidecar,
    "kill sidecar": _kill_sidecar,
    "kill attendant": _kill,
    "stop shortly": _stop,
    "stop": _stop,
    "stop with sidecar": _stop_with_sidecar,
    "stop sidecar": _stop_sidecar,
    "stop attendant": _stop,
    "partition shortly": _partition,
    "partition": _partition,
    "partition attendant": _partition,
    "refuse connections": _refuse,
    "cut connections": _cut,
    "lose a reply": _lose,
    "lose a reply of a member": _lose,
    "slow network": _slow,
    "kill redis": _kill_redis,
    "freeze redis": _freeze_redis,
    "flap redis": _flap_redis,
    "fill memory": _fill,
    "pause redis": _pause,
    "stop while memory is full": _stop_while_full,
}
