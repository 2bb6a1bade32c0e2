"""Systemd Units: a platform on which each member of a cluster is a service of systemd, by D-Bus (C91).

A member is up when its unit is, which READY=1 makes it; what it says of itself is its unit's status; systemd's watchdog
ends one that hangs, and when its last beat was is looked at from time to time. Members outlive a Controller that dies:
the next one finds their units and takes them over.
"""

import math
import os
import random
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio

from celery5.broker.servers.kept_folder import make_private
from celery5.errors import PlatformError
from celery5.protocol.cluster.description import Cluster
from celery5.protocol.cluster.members import (
    Beat,
    Ended,
    Member,
    MemberEvent,
    State,
    format_end_reason,
    parse_failure_reason,
)
from celery5.protocol.cluster.units import (
    SERVICE_INTERFACE,
    UNIT_INTERFACE,
    LaunchCommand,
    build_properties,
    format_environment_file,
    get_member_events,
    get_unit_name,
    get_unit_path,
    get_unit_pattern,
    parse_member_name,
    parse_state,
)
from celery5.protocol.job.retry_policy import full_jitter
from celery5.services.controller.systemd_bus import (
    SystemdBus,
    SystemdDisconnected,
    SystemdError,
    find_bus,
    get_runtime_folder,
    strip_types,
)

MAX_RECONNECT_DELAY = 5.0
"""Seconds between two attempts to reach a bus that is gone, at most."""
BEAT_CHECKS = 5
"""Looks at a member's last beat in the time after which it counts as hung."""
START_ATTEMPTS = 20
"""Attempts to start a member whose former unit systemd has not yet forgotten, a tenth of a second apart."""
_EXISTS = "org.freedesktop.systemd1.UnitExists"
_NONE = ("org.freedesktop.systemd1.NoSuchUnit", "org.freedesktop.DBus.Error.UnknownObject")


class _Known:
    """What is known of a member that runs: its unit, how it is, the last properties of its service, what it says of
    itself, the error that it ends with (`reason`), its last beat; whether systemd has `begun` to start it, since what
    was said before is about a former one. One that is not `ours` is another Controller's, beside which this one stands
    by: of that there is nothing to say. `files` have the environment of this run, and of former ones: never that of the
    next one."""

    def __init__(self, unit: str, now: State, *, begun: bool) -> None:
        self.unit = unit
        self.path = get_unit_path(unit)
        self.now: State = now
        self.begun = begun
        self.ours = not begun
        self.files: list[Path] = []
        self.said: dict[str, Any] = {}
        self.status = ""
        self.reason = ""
        self.beat = 0

    def begin(self) -> None:
        """systemd has taken it on."""
        self.begun = True


class SystemdUnits:
    """Members as services of the user's systemd, or of the system's when run by root.

    `environ` is what members inherit, beside what is theirs; `bus` the socket of another bus than the usual. Raises
    PlatformError where there is none.
    """

    def __init__(
        self, *, cluster: Cluster, app: str, environ: Mapping[str, str] | None = None, bus: str = ""
    ) -> None:
        self._environ = os.environ if environ is None else environ
        self._cluster = cluster
        self._app = app
        self._bus = SystemdBus(bus or find_bus(self._environ))
        self._folder = get_runtime_folder(self._environ)
        self._known: dict[str, _Known] = {}
        self._paths: dict[str, str] = {}
        self._doubtful: set[str] = set()
        self._doubt = trio.Event()
        self._heard: Callable[[MemberEvent], None] = _nobody

    async def live(
        self,
        heard: Callable[[MemberEvent], None],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Live until cancelled; what still runs then goes on, for the next Controller. A bus that is gone is tried
        again, but for the first time: then PlatformError is raised."""
        self._heard = heard
        begun, attempt = False, 0

        def up() -> None:
            nonlocal begun, attempt
            if not begun:
                task_status.started()
            begun, attempt = True, 0

        while True:
            try:
                await self._watch(up)
            except SystemdDisconnected:
                if not begun:
                    raise
            attempt += 1
            await trio.sleep(full_jitter(attempt, start=0.1, cap=MAX_RECONNECT_DELAY, random=random.random))

    async def start(self, member: Member) -> None:
        """Begin to start it. Raises PlatformError."""
        file = self._folder / f"{self._stem(member.name)}.{secrets.token_hex(4)}.env"
        unit = get_unit_name(self._app, member.name)
        told = build_properties(member, self._command(file))
        known = self._know(member.name, _Known(unit, "starting", begun=False))
        known.files = [*self._files(member.name), file]
        try:
            self._write_environment(file, member)
            for left in reversed(range(START_ATTEMPTS)):
                try:
                    what: tuple[Any, ...] = (unit, "fail", told, [])
                    await self._bus.call_manager(
                        "StartTransientUnit", "ssa(sv)a(sa(sv))", *what, on_done=known.begin
                    )
                    return
                except SystemdError as error:
                    if error.name != _EXISTS or not left:
                        raise
                with suppress(SystemdError):
                    await self._bus.call_manager("ResetFailedUnit", "s", unit)
                await trio.sleep(0.1)
        except PlatformError as error:
            if self._known.get(member.name) is known:
                self._forget(member.name)
            raise PlatformError(f"{member.name}: {error}") from None

    async def stop(self, name: str) -> None:
        """Have systemd end it: SIGTERM."""
        await self._about(name, "StopUnit", "ss", "replace")

    async def kill(self, name: str) -> None:
        """SIGKILL for its process; its understudy has a moment to put its jobs back, then systemd ends what is left."""
        try:
            await self._about(name, "KillUnit", "ssi", "main", int(signal.SIGKILL))
        except SystemdError:  # it has no such process just now
            await self._about(name, "KillUnit", "ssi", "all", int(signal.SIGKILL))

    async def reload(self, name: str) -> None:
        """SIGHUP for its process."""
        await self._about(name, "KillUnit", "ssi", "main", int(signal.SIGHUP))

    def pid_of(self, name: str) -> int | None:
        """The process id of a member; None when it is not known."""
        known = self._known.get(name)
        return None if known is None else int(known.said.get("MainPID", 0)) or None

    def outlives(self, _name: str) -> bool:
        """Services go on when a Controller has died."""
        return True

    async def living(self) -> Mapping[str, State]:
        """What runs in this cluster's name. Raises PlatformError."""
        await self._look()
        found = {name: known for name, known in self._known.items() if known.begun}
        for name, known in found.items():
            if not known.ours:
                known.ours, known.files = True, self._files(name)
        return {name: known.now for name, known in found.items()}

    async def _about(self, name: str, method: str, signature: str, *body: Any) -> None:
        """Ask for something about a member, if it runs."""
        known = self._known.get(name)
        if known is None:
            return
        try:
            await self._bus.call_manager(method, signature, known.unit, *body)
        except SystemdError as error:
            if error.name not in _NONE:
                raise
            self._tell(name, {"ActiveState": "inactive"})

    async def _watch(self, up: Callable[[], None]) -> None:
        """Be connected and look after members until the bus is gone. Raises BusLost."""
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._bus.run, self._hear)
                await self._look()
                up()
                nursery.start_soon(self._resolve_doubts)
                period = self._cluster.hung_after / BEAT_CHECKS or math.inf
                while True:
                    await trio.sleep(period)
                    for name in [name for name, known in self._known.items() if known.now == "up"]:
                        await self._feel(name)
        except BaseExceptionGroup as group:
            lost, others = group.split(SystemdDisconnected)
            if lost is None or others is not None:
                raise
            raise SystemdDisconnected(str(lost.exceptions[0])) from None

    async def _look(self) -> None:
        """See what runs: whoever is known and does not has ended, and whoever is not known and does is adopted."""
        live = ["activating", "active", "reloading", "deactivating"]
        (units,) = await self._bus.call_manager(
            "ListUnitsByPatterns", "asas", live, [get_unit_pattern(self._app)]
        )
        found = {parse_member_name(self._app, unit): (unit, active) for unit, _, _, active, *_ in units}
        found.pop("", None)
        for name in [name for name, known in self._known.items() if known.begun and name not in found]:
            self._doubtful.add(name)
        for name, (unit, active) in found.items():
            now = parse_state(active)
            if name in self._known:
                self._tell(name, {"ActiveState": active})
            elif now is not None:
                known = self._know(name, _Known(unit, now, begun=True))
                with suppress(SystemdError):  # it has just ended, which systemd says
                    known.said["MainPID"] = await self._bus.get_property(
                        known.path, SERVICE_INTERFACE, "MainPID"
                    )
        for name in tuple(self._doubtful):
            await self._look_at(name)

    async def _look_at(self, name: str) -> None:
        """See how one member is that may have ended without a word."""
        self._doubtful.discard(name)
        known = self._known.get(name)
        if known is None or not known.begun:
            return
        try:
            said = await self._bus.get_properties(known.path, UNIT_INTERFACE)
            known.said.update(await self._bus.get_properties(known.path, SERVICE_INTERFACE))
        except SystemdError:
            said = {"ActiveState": "inactive"}
        waits = parse_state(str(said["ActiveState"])) is None and said.get("Job", (0,))[0] != 0
        if self._known.get(name) is known and not waits:
            self._tell(name, {"ActiveState": said["ActiveState"]})

    async def _resolve_doubts(self) -> None:
        while True:
            await self._doubt.wait()
            self._doubt = trio.Event()
            for name in tuple(self._doubtful):
                await self._look_at(name)

    async def _feel(self, name: str) -> None:
        """Tell of a beat if there was one since the last look."""
        known = self._known.get(name)
        if known is None:
            return
        with suppress(SystemdError):  # it has just ended, and systemd says so
            beat = int(
                await self._bus.get_property(known.path, SERVICE_INTERFACE, "WatchdogTimestampMonotonic")
            )
            if beat != known.beat:
                known.beat = beat
                self._say(known, Beat(name))

    def _hear(self, path: str, what: str, body: tuple[Any, ...]) -> None:
        """One signal of systemd's. Never waits."""
        if what == "PropertiesChanged":
            name = self._paths.get(path, "")
            if name and self._known[name].begun:
                self._hear_change(name, str(body[0]), strip_types(body[1]))
        elif what == "JobRemoved" and body[3] != "done":
            self._wonder(parse_member_name(self._app, body[2]))
        elif what == "UnitRemoved":
            name = parse_member_name(self._app, body[0])
            if name in self._known:
                self._tell(name, {"ActiveState": "inactive"})

    def _hear_change(self, name: str, interface: str, changed: dict[str, Any]) -> None:
        """The properties of the service come before those of the unit: how it ended before that it has."""
        if interface == SERVICE_INTERFACE:
            known = self._known[name]
            before, status = known.status, str(changed.pop("StatusText", ""))
            known.said.update(changed)
            if parse_failure_reason(status):
                known.reason = parse_failure_reason(status)
            elif (
                status and status != before
            ):  # each change tells of the status, also of one that is as it was
                known.status = status
                self._say(known, Beat(name, status))
        elif (
            interface == UNIT_INTERFACE and changed.get("StateChangeTimestampMonotonic") != 0
        ):  # it has been started
            self._tell(name, changed)

    def _wonder(self, name: str) -> None:
        """Something that was to be done with a member was not: see how it is."""
        if name in self._known:
            self._doubtful.add(name)
            self._doubt.set()

    def _tell(self, name: str, changed: Mapping[str, Any]) -> None:
        """Tell what it means that properties of a unit have changed."""
        known = self._known[name]
        if not known.begun:
            return
        found = get_member_events(name, known.unit, {**known.said, **changed}, known.now)
        known.now = parse_state(str(changed.get("ActiveState", ""))) or known.now
        for word in found:
            if isinstance(word, Ended):
                self._forget(name)
                if word.code:
                    word = Ended(word.name, format_end_reason(word.how, known.reason), word.code)
            self._say(known, word)

    def _say(self, known: _Known, word: MemberEvent) -> None:
        if known.ours:
            self._heard(word)

    def _know(self, name: str, known: _Known) -> _Known:
        self._known[name] = known
        self._paths[known.path] = name
        return known

    def _forget(self, name: str) -> None:
        self._doubtful.discard(name)
        known = self._known.pop(name)
        self._paths.pop(known.path, None)
        for file in known.files:
            with suppress(OSError):
                file.unlink()

    def _command(self, environment: Path) -> LaunchCommand:
        return LaunchCommand(
            program=(sys.executable, "-m", "celery5"),
            directory=os.getcwd(),
            environment_file=str(environment),
            hung_after=self._cluster.hung_after,
            start_limit=self._cluster.start_limit,
        )

    def _stem(self, name: str) -> str:
        return get_unit_path(get_unit_name(self._app, name)).rpartition("/")[2]  # a unit's has backslashes

    def _files(self, name: str) -> list[Path]:
        """The files that there are by now. Each start has one of its own: another Controller may hear late of an end,
        and must not take away what the next one begins with."""
        return [each for each in self._folder.glob("*.env") if each.name.startswith(f"{self._stem(name)}.")]

    def _write_environment(self, path: Path, member: Member) -> None:
        """Raises PlatformError."""
        text = format_environment_file({**self._environ, **member.environment})
        try:
            make_private(self._folder)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(file, "w", encoding="utf-8", errors="surrogateescape") as to:
                to.write(text)
        except OSError as error:
            raise PlatformError(f"cannot write {path}, which has its environment: {error.strerror}") from None


def _nobody(_word: MemberEvent) -> None:
    """Nobody listens yet."""
