"""Remote host: run members on one other machine, as units of the user's systemd there.

One ssh process stays connected and reports the units at an interval. Actions are collected and performed in one
call. While the host is unreachable, the state of its members is unknown: they count as they were, and the
reason is reported. Actions wait, and the connection is tried again with backoff. The members keep running: they
depend on the systemd of their host, not on the connection.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import trio

from celery5.errors import PlatformError
from celery5.logs.log import Level, Log
from celery5.platform import Platform
from celery5.protocol.cluster.members import (
    Beat,
    Ended,
    Member,
    MemberEvent,
    Ready,
    State,
    Stopping,
    Unknown,
    format_end_reason,
    parse_failure_reason,
)
from celery5.protocol.cluster.remote_units import (
    LINE_PREFIX,
    NO_LINGER_REPORT,
    RemoteSetup,
    UnitCommand,
    UnitStatus,
    describe_exit,
    make_command_script,
    make_watch_script,
    parse_start_replies,
    parse_unit_statuses,
)
from celery5.protocol.job.retry_policy import full_jitter
from celery5.services.controller.ssh_line import HostUnreachable, OutputLines, SSHConnection

POLL_PERIOD = 2.0
"""Seconds between two reports of the units there."""
FIRST_STATUS_LIMIT = 20.0
"""Seconds for which a starting Controller waits for the first report."""
MISSES_UNTIL_GONE = 2
"""Reports without a unit after which it has ended. The first such report may have been made before it started."""
_ANY = "any"
"""The invocation of a unit that may have been started."""
_LONGEST_LOOK = 100_000
"""The most lines in one report."""
_LARGEST_LOOK = 16 * 1024 * 1024
"""The most characters in one report."""
_TOO_LARGE = (
    "the list of units there is too long to be read: look at `systemctl --user list-units 'celery5.*'` there"
)
_ALIVE: Mapping[str, State] = {
    "activating": "starting",
    "active": "up",
    "reloading": "up",
    "deactivating": "stopping",
}
_LINGERS_NOT = "ends its users' processes when they log out: run `loginctl enable-linger` there"


@dataclass(slots=True)
class _There:
    """A member as it was last reported."""

    state: State = "starting"
    invocation: str = ""  # '' until systemd there begins to start it
    tried: bool = False  # whether its start was requested, even if no answer came
    missing: int = 0  # reports in a row without it
    text: str = ""


class RemoteHost(Platform):
    """A platform on one remote host.

    Args:
        setup: how members run there.
        connection: how the host is reached.
        interval: seconds between two reports.
    """

    def __init__(
        self,
        *,
        name: str,
        setup: RemoteSetup,
        connection: SSHConnection,
        log: Log | None = None,
        interval: float = POLL_PERIOD,
    ) -> None:
        self._name = name
        self._place = setup
        self._line = connection
        self._log = log
        self._interval = interval
        self._report: Callable[[MemberEvent], None] = _nobody
        self._away = "not reached yet"
        self._refusal = ""
        self._members: dict[str, _There] = {}
        self._last: dict[str, UnitStatus] = {}
        self._asked: list[UnitCommand] = []
        self._something = trio.Event()
        self._tried = trio.Event()
        self._may_act: Callable[[], bool] = _always
        self._terms = 0
        self._ignoring = False

    async def live(
        self,
        report: Callable[[MemberEvent], None],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Stay connected and report events.

        It is up at once, so that an unreachable host does not hold up the cluster.
        """
        self._report = report
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_connected)
            nursery.start_soon(self._speak_of_the_unknown)
            task_status.started()

    async def start(self, member: Member) -> None:
        """Start the member as soon as the host can be reached, or adopt it if it runs there already."""
        self._members[member.name] = _There()
        self._ask(UnitCommand(verb="start", name=member.name, member=member))
        await trio.lowlevel.checkpoint()

    async def stop(self, name: str) -> None:
        """Stop the member: systemd sends SIGTERM, and kills it after `stop_after`."""
        there = self._members.get(name)
        if there is not None:
            self._asked = [each for each in self._asked if each.name != name]
            if there.tried:
                there.invocation = there.invocation or _ANY
                self._ask(UnitCommand(verb="stop", name=name))
            else:
                self._end(name, "had not been started", 0)
        await trio.lowlevel.checkpoint()

    async def kill(self, name: str) -> None:
        """Kill the member with SIGKILL.

        On an unreachable host this happens when the host is back, but its end is reported at once, as uncertain.
        If the request to stop still waits, that is sent instead, and systemd there kills the member when its time
        is over.
        """
        if name in self._members:
            unasked = bool(self._away) and UnitCommand(verb="stop", name=name) in self._asked
            self._asked = [each for each in self._asked if each.name != name]
            self._ask(UnitCommand(verb="stop" if unasked else "kill", name=name))
            if self._away:
                self._end(name, f"nobody knows: host {self._name} is away ({self._away})", None)
        await trio.lowlevel.checkpoint()

    async def reload(self, name: str) -> None:
        """Reload the member: send SIGHUP."""
        if name in self._members:
            self._ask(UnitCommand(verb="reload", name=name))
        await trio.lowlevel.checkpoint()

    def pid_of(self, name: str) -> int | None:
        """Return the process id of a member on that host, as last reported; None when it is not known."""
        unit = None if self._away else self._last.get(name)
        return (unit.pid or None) if unit is not None else None

    def outlives(self, _name: str) -> bool:
        """Return True: members on another host survive the Controller."""
        return True

    def fence(self, may_act: Callable[[], bool]) -> None:
        """Ask `may_act` before performing actions that waited for the host."""
        self._may_act = may_act

    def leave(self) -> None:
        """Leave the members to another Controller and drop the actions that still wait."""
        self._asked, self._members = [], {}
        self._terms += 1

    async def living(self) -> Mapping[str, State]:
        """Return the members of this application that run there; none when the host is unreachable."""
        with trio.move_on_after(FIRST_STATUS_LIMIT):
            await self._tried.wait()
        for name, unit in self._last.items():
            state = _ALIVE.get(unit.active)
            if state is not None and not self._away and name not in self._members:
                self._members[name] = _There(state=state, invocation=unit.invocation, tried=True)
        return {name: there.state for name, there in self._members.items()}

    async def _keep_connected(self) -> None:
        attempt = 0
        while True:
            try:
                watch = make_watch_script(self._place.app, self._interval)
                async with self._line.stream_lines(watch) as lines, trio.open_nursery() as nursery:
                    await self._hear_out(lines, nursery)
                    nursery.cancel_scope.cancel()
            except PlatformError as error:
                attempt = attempt + 1 if self._away else 0
                self._lost(str(error))
            self._tried.set()
            await trio.sleep(full_jitter(attempt, start=1.0, cap=30.0, random=random.random))

    async def _hear_out(self, lines: OutputLines, nursery: trio.Nursery) -> None:
        """Read reports until the connection ends. Waiting actions are performed from the first report on."""
        look, lines_seen, size = list[str](), 0, 0
        self._refusal = ""
        while (line := await lines.read_line()) is not None:
            if line == f"{LINE_PREFIX}{NO_LINGER_REPORT}":
                self._refusal = f"host {self._name} {_LINGERS_NOT}"
            elif line.startswith(LINE_PREFIX):
                if line == f"{LINE_PREFIX}seen":
                    if self._away:
                        self._back()
                        nursery.start_soon(self._do_what_is_asked)
                    if lines_seen > _LONGEST_LOOK or size > _LARGEST_LOOK:
                        self._ignore_look()
                    else:
                        self._ignoring = False
                        self._look(parse_unit_statuses(self._place.app, look))
                look, lines_seen, size = [], 0, 0
            else:
                lines_seen, size = lines_seen + 1, size + len(line)
                if lines_seen <= _LONGEST_LOOK and size <= _LARGEST_LOOK:
                    look.append(line)

    def _ignore_look(self) -> None:
        """Ignore a report that is too large: a member that is missing from the part that was read may still
        run.
        """
        if not self._ignoring:
            self._tell("host:status-ignored", "warning", hint=_TOO_LARGE)
        self._ignoring = True
        self._say_unknown(_TOO_LARGE)

    def _back(self) -> None:
        self._away = ""
        self._tell("host:connected", "info")

    def _lost(self, why: str) -> None:
        if why != self._away:
            self._tell("host:disconnected", "warning", why=why)
        self._away = why
        self._say_unknown(why)

    def _say_unknown(self, why: str) -> None:
        for name, there in list(self._members.items()):
            there.text = ""  # report its status again when the host is back
            self._report(Unknown(name, why))

    async def _speak_of_the_unknown(self) -> None:
        """Report unknown members at the reporting interval: without any event they would count as hung."""
        while True:
            await trio.sleep(self._interval)
            if self._away:
                self._say_unknown(self._away)

    def _look(self, found: dict[str, UnitStatus]) -> None:
        self._last = found
        self._tried.set()
        for name, there in list(self._members.items()):
            if there.invocation:
                self._judge(name, there, found.get(name))

    def _judge(self, name: str, there: _There, unit: UnitStatus | None) -> None:
        state = _ALIVE.get(unit.active) if unit else None
        if unit is None or (state is None and unit.invocation != there.invocation):
            there.missing += 1
            if there.missing >= MISSES_UNTIL_GONE:
                self._end(name, "its unit is gone: nobody knows how it ended", None)
            return
        there.missing = 0
        if state is None:
            how, code = describe_exit(unit)
            self._end(
                name, format_end_reason(how, parse_failure_reason(unit.status_text)) if code else how, code
            )
            return
        there.invocation = unit.invocation  # it may have been restarted by hand
        if state != there.state and state != "starting":
            self._report(Ready(name) if state == "up" else Stopping(name))
        there.state = state
        if state == "up":
            self._report(Beat(name, unit.status_text if unit.status_text != there.text else ""))
            there.text = unit.status_text

    def _end(self, name: str, how: str, code: int | None) -> None:
        self._members.pop(name, None)
        self._report(Ended(name, how, code))

    def _ask(self, act: UnitCommand) -> None:
        if act not in self._asked:
            self._asked.append(act)
        self._something.set()

    async def _do_what_is_asked(self) -> None:
        while True:
            if not self._asked:
                self._something = trio.Event()
                await self._something.wait()
            while self._asked and not self._may_act():  # noqa: ASYNC110  the answer depends on a clock
                await trio.sleep(self._interval)
            acts, self._asked, term = self._asked, [], self._terms
            try:
                await self._do(acts)
            except HostUnreachable as error:
                self._again(acts, term)
                self._tell("host:call-failed", "warning", why=str(error))
                await trio.sleep(self._interval)
            except PlatformError as error:
                for act in acts:
                    self._could_not(act, str(error))

    def _again(self, acts: list[UnitCommand], term: int) -> None:
        """Queue these actions again, unless another Controller took over this host after `term`."""
        if term == self._terms:
            self._asked = acts + self._asked

    async def _do(self, acts: list[UnitCommand]) -> None:
        if self._refusal:
            for act in acts:
                self._could_not(act, self._refusal)
            acts = [act for act in acts if act.member is None]
        if not acts:
            return
        for there in (self._members.get(act.name) for act in acts):
            if there is not None:
                there.tried = True
        term = self._terms
        try:
            said = await self._line.run_script(make_command_script(self._place, acts))
        except trio.Cancelled:
            self._again(acts, term)  # the connection was lost: all of it may happen twice
            raise
        for name, (word, more) in parse_start_replies(self._place.app, said).items():
            there = self._members.get(name)
            if there is not None and word == "begun":
                there.invocation, there.missing = more, 0
            elif there is not None:
                self._end(name, f"could not be started on host {self._name}: {more}", None)

    def _could_not(self, act: UnitCommand, why: str) -> None:
        if act.verb == "start" and act.name in self._members:
            self._end(act.name, f"could not be started: {why}", None)
        else:
            self._tell("host:call-failed", "warning", why=why, member=act.name, verb=act.verb)

    def _tell(self, what: str, level: Level, **fields: object) -> None:
        if self._log is not None:
            self._log.event(what, level, host=self._name, **fields)


def _always() -> bool:
    return True


def _nobody(_word: MemberEvent) -> None:
    """Ignore an event: nothing listens before `live` is called."""
