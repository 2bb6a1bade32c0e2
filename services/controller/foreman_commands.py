"""Foreman commands: run the control commands about a cluster's members, and reload on SIGHUP.

`members` reports the state of each member, `restart` restarts members, `scale` sets the number of workers, and
`reload` reads the cluster description again. A wrong description changes nothing.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
import trio

from celery5.errors import CommandRefused, Misconfigured
from celery5.logs.log import Log
from celery5.protocol.cluster.description import Cluster
from celery5.protocol.cluster.leadership import LeaderRecord
from celery5.protocol.cluster.members import Member, MemberState, Phase
from celery5.protocol.commands.definitions import (
    MEMBERS,
    RELOAD,
    RESTART,
    SCALE,
    NoParameters,
    RestartParameters,
    ScaleParameters,
)
from celery5.protocol.scaling.autoscale import Autoscale
from celery5.services.commands.dispatcher import CommandHandler, handle
from celery5.services.controller.foreman import Foreman
from celery5.services.process.reloader import ReloadSignal

DESCRIPTION_READ_LIMIT = 30.0
"""Seconds that reading the description may take."""


class LeaderLookup(Protocol):
    """Whether this Controller leads, and which one does."""

    @property
    def is_leader(self) -> bool: ...

    @property
    def record(self) -> LeaderRecord: ...


class ForemanCommands:
    """The control commands about a cluster's members.

    Args:
        load_cluster: reads the cluster description; may block.
        autoscale: the limits for the number of workers, when the application is scaled.
        configuration: when there is one, members that keep running reload it, too.
    """

    def __init__(
        self,
        *,
        foreman: Foreman,
        leader: LeaderLookup,
        load_cluster: Callable[[], Cluster],
        autoscale: Autoscale | None,
        configuration: object,
        reload_signal: ReloadSignal,
        log: Log,
    ) -> None:
        self._foreman = foreman
        self._leads = leader
        self._load_cluster = load_cluster
        self._autoscale = autoscale
        self._configuration = configuration
        self._reload_signal = reload_signal
        self._log = log
        self._scaled: Mapping[str, int] = {}

    @property
    def handlers(self) -> dict[str, CommandHandler]:
        """Return the handler of each command, by the command's name."""
        return {
            **handle(MEMBERS, self._members),
            **handle(RELOAD, self._reload),
            **handle(RESTART, self._restart),
            **handle(SCALE, self._scale),
        }

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Reload at each SIGHUP, until cancelled."""
        task_status.started()
        while True:
            await self._reload_signal.wait()
            try:
                await self.reload()
            except CommandRefused as error:
                self._log.event("cluster:rejected", "error", why=str(error))

    async def reload(self) -> dict[str, Any]:
        """Read the description again and apply what has changed.

        Raises CommandRefused for a wrong one, and changes nothing.
        """
        states = self._foreman.cluster_state.members
        before = {name: state.member for name, state in states.items() if state.is_wanted}
        try:
            with trio.fail_after(DESCRIPTION_READ_LIMIT):
                cluster = await trio.to_thread.run_sync(self._load_cluster, abandon_on_cancel=True)
        except trio.TooSlowError:
            raise CommandRefused(
                f"the description could not be read in {DESCRIPTION_READ_LIMIT:g} s: the old one stays"
            ) from None
        except (Misconfigured, OSError) as error:
            raise CommandRefused(f"the old description stays: {error}") from None
        if cluster.platform != self._foreman.cluster.platform:
            raise CommandRefused(
                f"the old description stays: the platform is {self._foreman.cluster.platform!r}, and another one "
                f"({cluster.platform!r}) needs a Controller that is started again"
            )
        if cluster.broker != self._foreman.cluster.broker:
            raise CommandRefused(
                "the old description stays: another [broker] needs a Controller that is started again"
            )
        settings = _find_changed_settings(self._foreman.cluster, cluster)
        change = self._foreman.cluster_state.begin_change()
        canaries = self._foreman.start_canaries(cluster)
        if not canaries:
            self._foreman.apply_description(cluster)
        after = {name: state.member for name, state in states.items() if state.is_wanted}
        found: dict[str, Any] = {**_compare_members(before, states), "settings": settings}
        if not self._leads.is_leader:
            found = {"stands_by": True}
        elif canaries:
            found = {"canaries": canaries}
        self._log.event("cluster:reloaded", **found)
        if self._configuration is not None:
            await self._foreman.reload_members(name for name in after if before.get(name) == after[name])
        return {**found, "change": change}

    async def _members(self, _parameters: NoParameters) -> object:
        cluster_state, now = self._foreman.cluster_state, trio.current_time()
        return {
            "platform": self._foreman.cluster.platform,
            "runs_broker": self._foreman.cluster.broker is not None,
            "whole": self._foreman.is_complete,
            "line": self._foreman.status_line,
            "pending": cluster_state.pending_names,
            "taken_back": self._foreman.rollback_reason,
            "leads": self._leads.is_leader,
            "leader": msgspec.structs.asdict(self._leads.record),
            "members": [
                _format_member(
                    name, state, now, self._foreman.pid_of(name) if state.phase.is_running else None
                )
                for name, state in sorted(cluster_state.members.items())
                if self._leads.is_leader or state.phase.is_running
            ],
        }

    async def _reload(self, _parameters: NoParameters) -> object:
        return await self.reload()

    async def _restart(self, parameters: RestartParameters) -> object:
        names, members = parameters.members, self._foreman.cluster_state.members
        unknown_names = [name for name in names or () if name not in members]
        if unknown_names:
            raise CommandRefused(
                f"no member {unknown_names[0]!r} here; there are: {', '.join(sorted(members))}"
            )
        change = self._foreman.cluster_state.begin_change()
        if names is None and (canaries := self._foreman.start_canaries()):
            return {"canaries": canaries, "change": change}
        restarted = self._foreman.restart(names) if self._leads.is_leader else ()
        return {"restarted": restarted, "change": change}

    async def _scale(self, parameters: ScaleParameters) -> object:
        wanted = parameters.target
        if self._autoscale is not None:
            wanted = min(max(wanted, self._autoscale.minimum), self._autoscale.maximum)
        change = self._foreman.cluster_state.begin_change()
        scale = self._foreman.set_worker_count(wanted)
        if scale != self._scaled:  # Schedulers repeat the command from time to time
            self._scaled = scale
            self._log.event("cluster:scaled", workers=wanted)
        return {"workers": wanted, "groups": scale, "change": change}


def _find_changed_settings(before: Cluster, after: Cluster) -> list[str]:
    """Return the names of the settings that changed, apart from the members."""
    names = (
        *("restart_limit", "restart_period", "hung_after", "start_limit"),
        *("canary", "canary_attempts", "canary_failures"),
    )
    return [name for name in names if getattr(before, name) != getattr(after, name)]


def _compare_members(before: Mapping[str, Member], states: Mapping[str, MemberState]) -> dict[str, Any]:
    """Return what a reload does with each member, compared with the members wanted `before`.

    Unchanged members keep running. A changed member that does not run is started with its new settings.
    """
    wanted = {name for name, state in states.items() if state.is_wanted}
    changed = {name for name in wanted & before.keys() if states[name].member != before[name]}
    runs = {name for name in changed if states[name].started_as is not None}
    return {
        "started": sorted((wanted - before.keys()) | (changed - runs)),
        "stopped": sorted(before.keys() - wanted),
        "restarted": sorted(name for name in runs if states[name].started_as != states[name].member),
    }


def _format_member(name: str, state: MemberState, now: float, pid: int | None) -> dict[str, Any]:
    """Return one member as a value for people and programs."""
    return {
        "name": name,
        "kind": state.member.kind,
        "group": state.member.group,
        "host": state.member.host,
        "phase": state.shown_phase,
        "pid": pid,
        "wanted": state.is_wanted,
        "for": round(max(0.0, now - state.phase_since), 3) if state.phase is not Phase.DOWN else None,
        "deaths": state.death_count,
        "restarts": state.restart_count,
        "recycling": state.recycle_reason if state.is_recycling else "",
        "replaces": state.replaces,
        "status": state.status,
        "status_age": round(max(0.0, now - state.status_at), 3) if state.status else None,
        "trouble": state.problem,
        "given_up_in": state.given_up_in,
        "code": state.code,
    }
