"""Diagnosis: what each reading of `celery5 doctor` means: ok, warn or fail, and what to do about it.

`diagnosis_host` has those of this machine. What fails loses jobs, or keeps them from running; what is warned of may one
day.
"""

import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Literal

import msgspec

FindingState = Literal["ok", "warn", "fail"]

OLDEST = (6, 2)
"""The oldest Redis that will do; every Valkey does."""
SKEWED, ASTRAY = 1.0, 5.0
"""Seconds that two clocks may differ: then it is told; then signed commands are not taken."""
SLOW_MEDIAN, SLOW_WORST = 0.01, 0.25
"""Seconds that a ping may take."""
LATE = 1.0
"""Seconds after which a ping, usually, is a broker that nobody can work with."""
ALMOST_FULL = 0.9
_CHANNEL, _KEY = re.compile(r"publish to|channel"), re.compile(r"access")
"""In the server's words: the command is permitted, but not there."""
_PLACES = ("~celery5:*", "&celery5:*")
NAMED = 5
"""Names that are told of many."""


class Finding(msgspec.Struct, frozen=True):
    """What one check has found: its `state`, a line on it, and, unless that is ok, what to do."""

    check: str
    state: FindingState
    says: str
    remedy: str = ""


def diagnose_server(info: Mapping[str, str]) -> Finding:
    """Which server it is, from `INFO`."""
    kind = "valkey" if info.get("valkey_version") else info.get("server_name") or "redis"
    version = info.get("valkey_version") or info.get("redis_version", "")
    says = f"{kind} {version or 'of an unknown version'}, {info.get('redis_mode', 'standalone')}"
    numbers = tuple(int(each) for each in re.findall(r"\d+", version)[:2])
    if info.get("role") in ("slave", "replica"):
        return Finding("server", "fail", f"{says}, a replica", "have the broker's URL name the master")
    if kind == "redis" and numbers and numbers < OLDEST:
        return Finding("server", "fail", says, f"upgrade it to {OLDEST[0]}.{OLDEST[1]} or newer")
    if info.get("redis_mode") == "cluster":
        return Finding("server", "warn", says, "a cluster is not tested yet: use one server and its replicas")
    if not numbers:
        return Finding("server", "warn", says, "have INFO permitted to this user, to know more")
    return Finding("server", "ok", says)


def diagnose_persistence(info: Mapping[str, str], config: Mapping[str, str] | None) -> Finding:
    """Whether jobs outlive the server, from `INFO` and, where that is permitted, `CONFIG GET`."""
    name = "persistence"
    for field, what in (
        ("aof_last_write_status", "the append-only file"),
        ("rdb_last_bgsave_status", "the last snapshot"),
    ):
        if info.get(field, "ok") != "ok":
            return Finding(
                name, "fail", f"{what} could not be written", "look at the server's log and its disk"
            )
    if config is None and not info:
        return Finding(
            name, "warn", "it cannot be read", "have INFO or CONFIG GET permitted to this user, to know"
        )
    known = config or {}
    appends = known.get("appendonly", "yes" if info.get("aof_enabled") == "1" else "no") == "yes"
    if appends:
        return _appends(known.get("appendfsync", ""))
    saves = known.get("save")
    if saves is None:
        return Finding(
            name,
            "warn",
            "appendonly no",
            "CONFIG SET appendonly yes, unless jobs may be lost with the server",
        )
    if not saves:
        remedy = "CONFIG SET appendonly yes, and say so in redis.conf, unless jobs may be lost"
        return Finding(name, "fail", "none: a restart of the server loses every job", remedy)
    return Finding(
        name,
        "warn",
        f"snapshots only (save {saves}): a crash loses minutes of jobs",
        "CONFIG SET appendonly yes, and say so in redis.conf",
    )


def _appends(how: str) -> Finding:
    if how == "no":
        return Finding(
            "persistence",
            "warn",
            "appendonly yes, appendfsync no: a crash of the machine may lose half a minute of jobs",
            "CONFIG SET appendfsync everysec, or always",
        )
    loss = {"everysec": "a crash of the machine may lose a second of jobs", "always": "nothing is lost"}
    said = f", appendfsync {how}: {loss.get(how, 'unknown')}" if how else ", appendfsync cannot be read"
    return Finding("persistence", "ok", f"appendonly yes{said}")


def diagnose_eviction(info: Mapping[str, str], config: Mapping[str, str] | None) -> Finding:
    """Whether the server throws jobs away when its memory is full, and how full it is."""
    policy = (config or {}).get("maxmemory-policy") or info.get("maxmemory_policy", "")
    most, used = _number(info.get("maxmemory")), _number(info.get("used_memory"))
    room = f", {used / most:.0%} of maxmemory used" if most else ""
    if not policy:
        return Finding("memory", "warn", "maxmemory-policy cannot be read", "make sure that it is noeviction")
    if policy != "noeviction":
        remedy = "CONFIG SET maxmemory-policy noeviction, and say so in redis.conf"
        return Finding("memory", "fail", f"{policy}: jobs are thrown away when memory is full{room}", remedy)
    if most and used > most * ALMOST_FULL:
        return Finding("memory", "warn", f"noeviction{room}", "raise maxmemory, or see what fills the queues")
    return Finding("memory", "ok", f"noeviction{room}")


def diagnose_clock(ahead: float, uncertain: float) -> Finding:
    """How far the server's clock is `ahead` of this host's; `uncertain` by half of a trip. Seconds."""
    off = max(abs(ahead) - uncertain, 0.0)
    way = "ahead of" if ahead > 0 else "behind"
    says = f"the server's clock is {abs(ahead):.3f} s {way} this host's"
    if off > ASTRAY:
        return Finding("clock", "fail", says, "set both by NTP: signed commands are refused as it is")
    if off > SKEWED:
        return Finding("clock", "warn", says, "set both by NTP: times in results and logs are wrong")
    return Finding("clock", "ok", says)


def diagnose_latency(pings: Sequence[float]) -> Finding:
    """How long pings took, in seconds."""
    middle, worst = median(pings), max(pings)
    says = f"{middle * 1000:.2f} ms, at worst {worst * 1000:.2f} ms, of {len(pings)} pings"
    if middle > LATE:
        return Finding(
            "latency", "fail", says, "have the broker near its workers, and its host not overloaded"
        )
    if middle > SLOW_MEDIAN or worst > SLOW_WORST:
        remedy = "have the broker near its workers; look for slow commands: redis-cli SLOWLOG GET"
        return Finding("latency", "warn", says, remedy)
    return Finding("latency", "ok", says)


def diagnose_permissions(user: str, tried: int, refused: Mapping[str, str]) -> Finding:
    """Whether the user may do what celery5 does; `refused` has the server's words for each command that it may not."""
    who = user or "default"
    if not refused:
        return Finding("permissions", "ok", f"user {who} may do all that is needed ({tried} commands tried)")
    channels = [name for name, why in refused.items() if _CHANNEL.search(why)]
    keys = [name for name, why in refused.items() if name not in channels and _KEY.search(why)]
    commands = [name for name in refused if name not in keys and name not in channels]
    says = [f"may not {_some(commands)}"] if commands else []
    says += [f"may not enter the keys of celery5 by {_some(keys)}"] if keys else []
    says += [f"may not use the channels of celery5 by {_some(channels)}"] if channels else []
    words = [
        *(f"+{each.lower()}" for each in commands),
        *_PLACES[: bool(keys)],
        *_PLACES[2 - bool(channels) :],
    ]
    return Finding(
        "permissions", "fail", f"user {who} {' and '.join(says)}", f"ACL SETUSER {who} {' '.join(words)}"
    )


def diagnose_keys(looked: int, complete: bool, orphans: Sequence[str]) -> Finding:
    """Whether keys that nobody owns stay for ever; `complete` when all were looked at."""
    scope = f"{looked} keys looked at" + ("" if complete else ", of more")
    if orphans:
        says = f"{len(orphans)} have neither owner nor time to live: {_some(orphans)} ({scope})"
        return Finding("keys", "warn", says, "if no newer version of celery5 made them: redis-cli DEL")
    return Finding("keys", "ok", f"each has an owner or a time to live ({scope})")


def _number(said: str | None) -> int:
    return int(said) if said and said.isdigit() else 0


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
