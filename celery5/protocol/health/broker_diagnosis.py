"""Diagnose the broker for `celery5 doctor`: each finding is ok, a warning or a failure, and names a remedy.

A failure loses jobs or keeps them from running; a warning may do so one day. `host_diagnosis` diagnoses this machine.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from celery5.protocol.counts import format_count
from celery5.protocol.health.server_memory import MORE_MEMORY, read_server_memory
from celery5.protocol.health.server_nodes import PrimaryView, read_replicas
from celery5.similar_names import join_names

FindingState = Literal["ok", "warn", "fail"]

OLDEST_REDIS = (6, 2)
"""The oldest Redis that is supported. Every Valkey is."""
OTHER_SERVERS: Mapping[str, tuple[FindingState, str]] = {
    "garnet": ("fail", "it has no streams"),
    "dragonfly": ("warn", "celery5 is not tested on it; by default it refuses scripts that compute keys"),
    "kvrocks": ("warn", "celery5 is not tested on it"),
    "keydb": ("warn", "celery5 is not tested on it"),
}
"""Servers that speak the protocol of Redis, with the state and text of the finding for each."""
WARNED_SKEW, REFUSED_SKEW = 1.0, 5.0
"""Seconds that two clocks may differ before there is a warning, and before signed commands are refused."""
SLOW_MEDIAN, SLOW_WORST = 0.01, 0.25
"""Seconds that pings may take, in the median and at worst."""
UNUSABLE_MEDIAN = 1.0
"""Seconds of a median ping with which a broker is of no use."""
_CHANNEL_REFUSAL, _KEY_REFUSAL = re.compile(r"publish to|channel"), re.compile(r"access")
"""What the server answers when a command is permitted, but not on this channel or key."""
# Never a rule for the user that has asked: it may be one of a role that may less on purpose, or another application's.
_MORE_PERMISSIONS = (
    "celery5 acl operator prints the line for a user who may: put that user into the broker's URL; "
    "the users of other roles may less, on purpose"
)
MAX_NAMES = 5
"""Names that are listed of many."""
AOF_IS_WRITTEN = (
    "INFO says aof_rewrite_in_progress:0, aof_rewrite_scheduled:0 and aof_last_bgrewrite_status:ok"
)
"""When an append-only file has all that the server has. While a snapshot is being saved, its rewriting is scheduled
only."""
TURN_AOF_ON = (
    f"CONFIG SET appendonly yes; when {AOF_IS_WRITTEN}, CONFIG REWRITE; a server without a configuration file must be "
    "started with --appendonly yes from then on. Never by redis.conf and a restart alone: that begins without any job"
)
"""A server that finds `appendonly yes` in its file and no complete append-only file starts empty, whatever its snapshot
has."""
CORRECT_CLOCK = (
    "have NTP correct both, that of the server by slewing: a step forward ends the leases of its workers"
)
LOOK_AT_KEY = "redis-cli TYPE and OBJECT IDLETIME tell more of one"
PUT_KEY_ASIDE = (
    "no process can use it: unless a newer celery5 runs here, another program has written there; stop that program, "
    "and put the key aside, so that nothing is lost: redis-cli RENAMENX KEY aside:KEY"
)


class Finding(msgspec.Struct, frozen=True):
    """What one check has found: its `state`, a line on it, and a remedy unless it is ok."""

    check: str
    state: FindingState
    summary: str
    remedy: str = ""
    # The checks that were left out, of the one finding on these.
    skipped: tuple[str, ...] = ()


def describe_server(info: Mapping[str, str]) -> str:
    """Return the kind and version of the server, from `INFO`: `valkey 8.1.1`."""
    return f"{_get_kind(info)} {_get_version(info) or 'of an unknown version'}"


def _get_kind(info: Mapping[str, str]) -> str:
    named = next((kind for kind in ("valkey", *OTHER_SERVERS) if info.get(f"{kind}_version")), "")
    # KeyDB has no version of its own in INFO, but this field.
    return named or ("keydb" if "mvcc_depth" in info else info.get("server_name") or "redis")


def _get_version(info: Mapping[str, str]) -> str:
    return info.get(f"{_get_kind(info)}_version") or info.get("redis_version", "")


def diagnose_server(info: Mapping[str, str]) -> Finding:
    """Diagnose the kind and version of the server, from `INFO`."""
    kind, version = _get_kind(info), _get_version(info)
    summary = f"{describe_server(info)}, {info.get('redis_mode', 'standalone')}"
    numbers = tuple(int(digits) for digits in re.findall(r"\d+", version)[:2])
    if info.get("role") in ("slave", "replica"):
        return Finding("server", "fail", f"{summary}, a replica", "have the broker's URL name the master")
    if kind == "redis" and numbers and numbers < OLDEST_REDIS:
        return Finding(
            "server", "fail", summary, f"upgrade it to {OLDEST_REDIS[0]}.{OLDEST_REDIS[1]} or newer"
        )
    if kind == "keydb" and info.get("role") == "active-replica":
        return Finding(
            "server",
            "fail",
            f"{summary}, an active replica: two servers accept writes, so jobs run twice",
            "turn active-replica off, and have the broker's URL name the one primary",
        )
    if kind in OTHER_SERVERS:
        state, reason = OTHER_SERVERS[kind]
        return Finding("server", state, f"{summary}: {reason}", "use Redis 6.2 or newer, or Valkey")
    if not numbers:
        return Finding("server", "warn", summary, "have INFO permitted to this user, to know more")
    return Finding("server", "ok", summary)


def diagnose_persistence(info: Mapping[str, str], config: Mapping[str, str] | None) -> Finding:
    """Diagnose whether jobs outlive the server, from `INFO` and, where that is permitted, `CONFIG GET`."""
    name = "persistence"
    for field, file in (
        ("aof_last_write_status", "the append-only file"),
        ("rdb_last_bgsave_status", "the last snapshot"),
    ):
        if info.get(field, "ok") != "ok":
            return Finding(
                name, "fail", f"{file} could not be written", "look at the server's log and its disk"
            )
    if config is None and not info:
        return Finding(
            name, "warn", "it cannot be read", "have INFO or CONFIG GET permitted to this user, to know"
        )
    config_or_empty = config or {}
    appends = config_or_empty.get("appendonly", "yes" if info.get("aof_enabled") == "1" else "no") == "yes"
    if appends:
        appendfsync = config_or_empty.get("appendfsync", "")
        return _diagnose_rewriting(info) or _diagnose_appendfsync(appendfsync)
    saves = config_or_empty.get("save")
    if saves is None:
        return Finding(
            name,
            "warn",
            "appendonly no",
            f"{TURN_AOF_ON}. Unless jobs may be lost with the server",
        )
    if not saves:
        remedy = f"{TURN_AOF_ON}. Unless jobs may be lost with the server"
        return Finding(name, "fail", "none: a restart of the server loses every job", remedy)
    return Finding(
        name,
        "warn",
        f"snapshots only (save {saves}): a crash loses minutes of jobs",
        TURN_AOF_ON,
    )


def _diagnose_rewriting(info: Mapping[str, str]) -> Finding | None:
    """Return what is wrong with an append-only file that was just turned on, or that cannot be rewritten."""
    if info.get("aof_last_bgrewrite_status", "ok") != "ok":
        summary = "the append-only file could not be rewritten"
        remedy = f"look at the server's log and its disk; do not restart it before {AOF_IS_WRITTEN}"
        return Finding("persistence", "fail", summary, remedy)
    is_rewritten = "1" in (info.get("aof_rewrite_in_progress"), info.get("aof_rewrite_scheduled"))
    if is_rewritten and info.get("aof_base_size") == "0":
        summary = "the append-only file is being written for the first time: it does not have all jobs yet"
        return Finding("persistence", "warn", summary, f"do not restart the server before {AOF_IS_WRITTEN}")
    return None


def _diagnose_appendfsync(appendfsync: str) -> Finding:
    if appendfsync == "no":
        return Finding(
            "persistence",
            "warn",
            "appendonly yes, appendfsync no: a crash of the machine may lose half a minute of jobs",
            "CONFIG SET appendfsync everysec, or always, and say so in redis.conf",
        )
    # While the disk is slow, Redis answers before it writes, for up to two seconds: then its process need only crash.
    loss = {"everysec": "a crash may lose two seconds of jobs", "always": "nothing is lost"}
    detail = (
        f", appendfsync {appendfsync}: {loss.get(appendfsync, 'unknown')}"
        if appendfsync
        else ", appendfsync cannot be read"
    )
    return Finding("persistence", "ok", f"appendonly yes{detail}")


def diagnose_eviction(
    info: Mapping[str, str], config: Mapping[str, str] | None, filled_by: str = ""
) -> Finding:
    """Diagnose whether the server evicts jobs when its memory is full, and how full it is.

    Args:
        info: Its `INFO`.
        config: Its parameters; None where they cannot be read.
        filled_by: What takes the most of its memory, in words; '' for not known.
    """
    policy = (config or {}).get("maxmemory-policy") or info.get("maxmemory_policy", "")
    memory = read_server_memory("", info, policy)
    usage = f", {memory.share:.0%} of maxmemory used" if memory is not None and memory.limit else ""
    if not policy:
        return Finding("memory", "warn", "maxmemory-policy cannot be read", "make sure that it is noeviction")
    if memory is not None and memory.is_full:
        return Finding("memory", "fail", replace(memory, filled_by=filled_by).describe(), MORE_MEMORY)
    if policy != "noeviction":
        remedy = "CONFIG SET maxmemory-policy noeviction, and say so in redis.conf"
        return Finding("memory", "fail", f"{policy}: jobs are thrown away when memory is full{usage}", remedy)
    if memory is not None and memory.is_almost_full:
        return Finding("memory", "warn", replace(memory, filled_by=filled_by).describe(), MORE_MEMORY)
    return Finding("memory", "ok", f"noeviction{usage}")


class SentinelView(msgspec.Struct, frozen=True):
    """What one sentinel answers: the primary, '' if it does not know the service, or its error."""

    name: str
    primary: str = ""
    no_quorum: str = ""  # why it could promote no replica
    error: str = ""


def diagnose_replication(
    info: Mapping[str, str],
    config: Mapping[str, str] | None,
    *,
    wanted: int,
    sentinels: Sequence[SentinelView] = (),
) -> Finding:
    """Diagnose whether a failover has where to go, and what it may lose.

    Args:
        info: The `INFO` of the primary.
        config: Its parameters; None where they cannot be read.
        wanted: How many replicas the setting `replicas` demands.
        sentinels: What each sentinel answers; none if the URL names none.
    """
    name = "replication"
    replicas = [replica.address for replica in read_replicas(info) if replica.is_online]
    primaries = list(dict.fromkeys(view.primary for view in sentinels if view.primary))
    count = format_count(len(replicas), "replica")
    summary = f"{count}{': ' if replicas else ''}{_join_names(replicas)}"
    summary = f"primary {' or '.join(primaries)}, {summary}" if primaries else summary
    if no_quorum := next((view for view in sentinels if view.no_quorum), None):
        return Finding(
            name,
            "fail",
            f"{summary}; sentinel {no_quorum.name}: {no_quorum.no_quorum}",
            "start more sentinels",
        )
    if len(replicas) < wanted:
        return Finding(
            name,
            "fail",
            f"{summary}; the setting replicas demands {wanted}",
            "start more, or look at their logs",
        )
    if silent := [view for view in sentinels if not view.primary]:
        why = "; ".join(
            f"sentinel {view.name} {view.error or 'does not know the service'}" for view in silent
        )
        return Finding(
            name, "warn", f"{summary}; {why}", "look at it: without a majority there is no failover"
        )
    if len(primaries) > 1:
        return Finding(name, "warn", summary, "a failover is under way, or a sentinel is cut off: look again")
    if sentinels and not replicas:
        return Finding(name, "warn", summary, "start a replica: there is none that could be promoted")
    return _diagnose_isolated_primary(summary, config)


def diagnose_cluster(
    primaries: Sequence[PrimaryView], config: Mapping[str, str] | None, *, wanted: int
) -> Finding:
    """Diagnose whether each primary of a cluster has a replica to take its place.

    Args:
        primaries: The primaries.
        config: The parameters of one of them; None where they cannot be read.
        wanted: How many replicas the setting `replicas` demands.
    """
    name = "replication"
    summary = "; ".join(
        f"{primary.address} (slots {', '.join(primary.slots)}): "
        + (primary.error or ", ".join(replica.describe() for replica in primary.replicas) or "no replica")
        for primary in primaries
    )
    if any(len(primary.online_replicas) < wanted for primary in primaries if not primary.error):
        remedy = "start more replicas, or look at their logs"
        return Finding(name, "fail", f"{summary}; the setting replicas demands {wanted} of each", remedy)
    if any(primary.error for primary in primaries):
        return Finding(name, "warn", summary, "a primary cannot be asked: look at its log")
    if without_replica := [primary.address for primary in primaries if not primary.online_replicas]:
        remedy = f"start a replica of {_join_names(without_replica)}: none could be promoted"
        return Finding(name, "warn", summary, remedy)
    return _diagnose_isolated_primary(summary, config)


def _diagnose_isolated_primary(summary: str, config: Mapping[str, str] | None) -> Finding:
    """Diagnose whether a primary without its replicas accepts jobs: a failover would lose them."""
    if config is not None and config.get("min-replicas-to-write") == "0":
        remedy = (
            "CONFIG SET min-replicas-to-write 1 on each server, and say so in redis.conf: a primary that is cut off "
            "from its replicas then refuses jobs after min-replicas-max-lag seconds, in place of losing them"
        )
        return Finding("replication", "warn", f"{summary}; min-replicas-to-write 0", remedy)
    return Finding("replication", "ok", summary)


def diagnose_clock(ahead: float, uncertain: float) -> Finding:
    """Diagnose how many seconds the server's clock is `ahead` of this host's, `uncertain` by half a round trip."""
    skew = max(abs(ahead) - uncertain, 0.0)
    direction = "ahead of" if ahead > 0 else "behind"
    summary = f"the server's clock is {abs(ahead):.3f} s {direction} this host's"
    if skew > REFUSED_SKEW:
        return Finding("clock", "fail", summary, f"signed commands are refused as it is: {CORRECT_CLOCK}")
    if skew > WARNED_SKEW:
        return Finding("clock", "warn", summary, f"times in results and logs are wrong: {CORRECT_CLOCK}")
    return Finding("clock", "ok", summary)


def diagnose_latency(pings: Sequence[float]) -> Finding:
    """Diagnose how many seconds pings took."""
    middle, worst = sorted(pings)[len(pings) // 2], max(pings)
    summary = f"{middle * 1000:.2f} ms, at worst {worst * 1000:.2f} ms, of {format_count(len(pings), 'ping')}"
    if middle > UNUSABLE_MEDIAN:
        return Finding(
            "latency", "fail", summary, "have the broker near its workers, and its host not overloaded"
        )
    if middle > SLOW_MEDIAN or worst > SLOW_WORST:
        remedy = "have the broker near its workers; look for slow commands: redis-cli SLOWLOG GET"
        return Finding("latency", "warn", summary, remedy)
    return Finding("latency", "ok", summary)


def diagnose_permissions(user: str, tried: int, refused: Mapping[str, str]) -> Finding:
    """Diagnose whether the user may do what celery5 does; `refused` has the server's answer to each refused command."""
    user_name = user or "default"
    if not refused:
        return Finding(
            "permissions", "ok", f"user {user_name} may do all that is needed ({tried} commands tried)"
        )
    channels = [name for name, why in refused.items() if _CHANNEL_REFUSAL.search(why)]
    keys = [name for name, why in refused.items() if name not in channels and _KEY_REFUSAL.search(why)]
    commands = [name for name in refused if name not in keys and name not in channels]
    summary = [f"may not {_join_names(commands)}"] if commands else []
    summary += [f"may not enter the keys of celery5 by {_join_names(keys)}"] if keys else []
    summary += [f"may not use the channels of celery5 by {_join_names(channels)}"] if channels else []
    return Finding("permissions", "fail", f"user {user_name} {' and '.join(summary)}", _MORE_PERMISSIONS)


def diagnose_keys(
    key_count: int,
    is_complete: bool,
    orphans: Sequence[str],
    undying: Sequence[str] = (),
    *,
    mistyped: Sequence[str] = (),
    unreadable: Sequence[str] = (),
) -> Finding:
    """Diagnose whether keys stay for ever, or cannot be used. No remedy deletes: a newer version, or another program,
    may need them.

    Args:
        key_count: How many keys were looked at.
        is_complete: Whether these are all.
        orphans: Those that this version does not know, and that have no time to live.
        undying: Those that should have a time to live, and have none.
        mistyped: What is said of each key of a type that celery5 does not give it.
        unreadable: The tasks of limits and suspensions that cannot be read.
    """
    scope = f"{format_count(key_count, 'key')} looked at" + ("" if is_complete else ", of more")
    if mistyped:
        return Finding("keys", "fail", f"{_join_names(mistyped)} ({scope})", PUT_KEY_ASIDE)
    if unreadable:
        summary = (
            f"limits or suspensions that do not hold, since they cannot be read: {_join_names(unreadable)}"
        )
        remedy = "set each again, or take it back: celery5 task limit NAME none, or celery5 task resume NAME"
        return Finding("keys", "warn", f"{summary} ({scope})", remedy)
    if orphans:
        summary = f"{len(orphans)} have neither owner nor time to live: {_join_names(orphans)} ({scope})"
        remedy = (
            f"leave them until you know what made them, a newer celery5 or another program; {LOOK_AT_KEY}"
        )
        return Finding("keys", "warn", summary, remedy)
    if undying:
        summary = (
            f"{len(undying)} should have a time to live, and have none: {_join_names(undying)} ({scope})"
        )
        remedy = f"leave them, they take memory only, and report it; {LOOK_AT_KEY}"
        return Finding("keys", "warn", summary, remedy)
    return Finding("keys", "ok", f"each has an owner or a time to live ({scope})")


def _join_names(names: Sequence[str]) -> str:
    return join_names(names, MAX_NAMES)
