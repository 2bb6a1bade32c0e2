"""Compute what a user of Redis must be permitted for each role: from the scripts and calls themselves."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Mapping
from functools import cache

import msgspec

from celery5.broker import calls
from celery5.broker.call import Script
from celery5.broker.keys import Keys
from celery5.broker.lua_commands import find_lua_commands, keep_reachable, strip_lua_comments
from celery5.errors import Misconfigured
from celery5.similar_names import did_you_mean


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


READING = _words(
    "bitpos exists get getbit hexists hget hgetall hkeys hlen hmget hscan hstrlen hvals lindex llen lrange mget pttl "
    "smembers time xinfo xlen xpending xrange xread xrevrange zcard zcount zlexcount zrandmember zrange zrangebylex "
    "zrangebyscore zrank zrevrange zrevrangebyscore zscore"
)
"""Commands that change nothing."""
_CONNECTING = _words(
    "asking auth cluster|slots hello ping select client|unblock eval evalsha subscribe unsubscribe"
)
"""What every role needs: to log in, to find the slots of a cluster, to call scripts, to wait for what is announced."""
_ON_CLUSTERS = _words("spublish ssubscribe sunsubscribe")
"""What a cluster from 7.0 has beside PUBLISH, SUBSCRIBE and UNSUBSCRIBE. Redis 6.2 refuses a user with an unknown
command, so their category is permitted, without the commands in it that no role needs: each server takes that.
"""
_CHANNELS = ("+@pubsub", "-psubscribe", "-punsubscribe", "-pubsub")
_ONLY_LISTENING = ("+@pubsub", "-@fast", *_CHANNELS[1:])
"""For a role without PUBLISH. The category `fast` has PUBLISH and SPUBLISH, and no other command of `pubsub`."""
_PLAIN = _words("del hdel sadd set srem unlink wait xautoclaim xdel xgroup|create xreadgroup xtrim")
"""Commands beside the reading ones that calls make without a script."""
_INSPECTING = _words("info memory|usage")
_OPERATING = _words("scan type")
"""Commands that only `celery5 doctor` uses. Nobody gets CONFIG GET, which shows passwords: it does without."""


class Role(msgspec.Struct, frozen=True):
    """What a process does with the broker."""

    description: str
    # Its scripts; None for all that are not for operators alone, and `()` for those that only read.
    scripts: tuple[str, ...] | None
    # The commands that it makes without a script.
    commands: frozenset[str]


_SENDING = ("publish", "schedule", "publish_unique", "locate", "read_states")
_FOLLOWING = (
    *(
        "advance",
        "append",
        "claim_home",
        "define",
        "inspect_job",
        "read_run",
        "record_action",
        "revoke",
        "scan_run",
    ),
    *("stage", "watch"),
)
_OF_OPERATORS = frozenset({"erase", "probe_permissions"})
_OF_PROCESSES = READING | _PLAIN | _INSPECTING

ROLES: Mapping[str, Role] = {
    "sender": Role(
        "sends jobs and events, and waits for results: it reads no queue, takes no job and deletes nothing",
        _SENDING,
        _words("exists get hget hmget mget sadd set smembers wait"),
    ),
    "producer": Role(
        "sends all that there is, and follows, finds, revokes and forgets it: jobs, events, records, workflows",
        (*_SENDING, *_FOLLOWING),
        READING | _words("del sadd set wait"),
    ),
    "worker": Role("runs jobs and processors", None, _OF_PROCESSES),
    "router": Role("delivers events and documents", None, _OF_PROCESSES),
    "scheduler": Role("fires schedules, imposes limits and scales", None, _OF_PROCESSES),
    "controller": Role("keeps processes alive", None, _OF_PROCESSES),
    "publisher": Role("publishes what producers hand to it", None, _OF_PROCESSES),
    "viewer": Role(
        "only looks: commands that show something, a dashboard of viewers", (), READING | _INSPECTING
    ),
    "operator": Role(
        "does whatever the command line and the dashboard can do",
        None,
        READING | _PLAIN | _INSPECTING | _OPERATING,
    ),
}
SENTINEL = "sentinel"
"""The role of all processes at the sentinels, which are servers of their own, and have users of their own."""
ALL_ROLES: Mapping[str, Role] = {
    **ROLES,
    SENTINEL: Role(
        "asks sentinels for the primary: for the sentinels, not for Redis; the same for all processes",
        (),
        _words("auth hello sentinel|ckquorum sentinel|get-master-addr-by-name sentinel|masters"),
    ),
}


class AclUser(msgspec.Struct, frozen=True):
    """A user of Redis for one role."""

    user: str
    role: str
    description: str
    keys: tuple[str, ...]
    channels: tuple[str, ...]
    commands: tuple[str, ...]
    # The rules for ACL SETUSER: all of them, whatever the user had before, but for its passwords.
    rules: tuple[str, ...]


def make_user(app: str, role: str, user: str = "") -> AclUser:
    """Return the user for a role of an application. Raises Misconfigured for a role that there is not.

    Every server that is supported takes its rules, and it works on a single server and on a cluster.

    Args:
        app: The name of the application.
        role: One of ROLES, or SENTINEL.
        user: The name of the user; by default `app-role`.
    """
    if role not in ALL_ROLES:
        remedy = did_you_mean(role, ALL_ROLES, otherwise=f"there are {', '.join(ALL_ROLES)}")
        raise Misconfigured(f"role {role!r} is not known: {remedy}")
    if re.search(r"\s", user or app):
        raise Misconfigured(f"user {user or app!r}: the name of a user of Redis has no spaces")
    patterns = Keys(app).patterns if role in ROLES else ()
    keys, channels = (tuple(f"{kind}{pattern}" for pattern in patterns) for kind in "~&")
    commands = get_commands(role) if role in ROLES else tuple(sorted(ALL_ROLES[role].commands))
    return AclUser(
        user=user or f"{app}-{role}",
        role=role,
        description=ALL_ROLES[role].description,
        keys=keys,
        channels=channels,
        commands=commands,
        rules=("on", "resetkeys", *keys, "resetchannels", *channels, "nocommands", *_permit(commands)),
    )


def _permit(commands: tuple[str, ...]) -> tuple[str, ...]:
    """Return the rules that permit these commands, to a user who may do nothing."""
    listening = () if "subscribe" not in commands else _CHANNELS if "publish" in commands else _ONLY_LISTENING
    return (*listening, *(f"+{command}" for command in commands if command not in _ON_CLUSTERS))


def get_commands(role: str) -> tuple[str, ...]:
    """Return the commands that a role uses, those inside of its scripts too, sorted."""
    found = {*_CONNECTING, *ROLES[role].commands}
    for script in list_scripts(role):
        found |= find_commands(script)
    found |= _ON_CLUSTERS - (set() if "publish" in found else {"spublish"})
    # A command as a whole includes its subcommands.
    return tuple(sorted(name for name in found if "|" not in name or name.partition("|")[0] not in found))


def list_scripts(role: str) -> list[Script]:
    """Return the scripts that a role calls."""
    names, scripts = ROLES[role].scripts, load_scripts().values()
    if names is None:
        return [script for script in scripts if role == "operator" or script.name not in _OF_OPERATORS]
    if not names:
        return [
            script
            for script in scripts
            if find_commands(script) <= READING and script.name not in _OF_OPERATORS
        ]
    return [script for script in scripts if script.name in names]


@cache
def load_scripts() -> Mapping[str, Script]:
    """Return all scripts that the calls load, by name."""
    modules = [
        importlib.import_module(f"{calls.__name__}.{module.name}")
        for module in pkgutil.iter_modules(calls.__path__)
    ]
    # Not `vars`: a module that loads late has nothing in it before its first use.
    found = [
        value for module in modules for _, value in inspect.getmembers(module) if isinstance(value, Script)
    ]
    return {script.name: script for script in found}


@cache
def find_commands(script: Script) -> frozenset[str]:
    """Return the commands that a script may run, as ACL SETUSER takes them."""
    return find_lua_commands(keep_reachable(strip_lua_comments(script.body)))
