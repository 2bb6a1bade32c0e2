"""Translates errors of hiredis, the operating system and Trio into errors of celery5.

All drivers pass what they catch through `translate_error`, so that no other layer needs to know foreign errors.
"""

import os
import re
import ssl
from typing import Any, Final, cast

import hiredis

from celery5.broker.call import Call, Script
from celery5.broker.lua_commands import find_lua_commands
from celery5.errors import (
    BrokerDenied,
    BrokerError,
    BrokerLoading,
    BrokerReadOnly,
    BrokerReplied,
    BrokerUnavailable,
    BrokerUnsupported,
    UnreadableReply,
)
from celery5.protocol.byte_counts import format_bytes
from celery5.protocol.hash_slots import Redirection, parse_redirection
from celery5.protocol.health.server_memory import MORE_MEMORY, OUT_OF_MEMORY, read_server_memory
from celery5.protocol.masking import MAX_ERROR_LENGTH, collapse_whitespace, escape_text, get_error_text

# Redis 6.2 wraps the error of a command inside a script; later servers return it as it is.
_INSIDE_SCRIPT = re.compile(r"^ERR Error running script .*@user_script: ?\d+: -?([A-Z]{3,} .*)$", re.DOTALL)
# What a script has caught and raises again begins with ERR, whatever it was.
_RAISED_AGAIN = re.compile(r"^ERR -?((?:OOM|MISCONF|READONLY|NOREPLICAS) .*)$", re.DOTALL)

# "ERR" says nothing, so for these the text decides.
_DENIED_TEXTS = (
    "invalid password",
    "AUTH <password> called without",
    "Client sent AUTH",
    "problem with LDAP",
)

_NOT_NOW = {
    "BUSY": "is busy running a script",
    "TRYAGAIN": "asks to try again",
    "CLUSTERDOWN": "says that its cluster is down",
    "MASTERDOWN": "has lost its master",
}
_UNSTABLE = frozenset({"TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN"})
"""Codes of errors of a cluster in which a slot migrates, or has no primary at the moment."""
_OF_A_CLUSTER = frozenset({"MOVED", "ASK", "CROSSSLOT"})
"""Codes of errors that only a Redis Cluster sends."""
_DENIED_IN_SCRIPT = re.compile(r"ACL failure in script:|The user executing the script can't ")
_NAMED_COMMAND = re.compile(r"run the '([^']{1,40})' command")
_PLACE_IN_SCRIPT = re.compile(r"@user_script: ?(\d+)")
_DENIED = {
    "NOAUTH": "wants a password; put user and password into the broker URL",
    "WRONGPASS": "refuses this user or password; check both in the broker URL",
    "NOPERM": "does not permit this to the user: extend the user's ACL as `celery5 acl` says",
    "DENIED": "is in protected mode: set a password, or bind it to an address",
}

DEFAULT_URL = "redis://127.0.0.1:6379/0"
"""The broker of an application that names none."""


def translate_error(error: Exception, *, maybe_done: bool, where: str) -> BrokerError:
    """Return the error of celery5 for `error`; the caller raises it `from` the original.

    Args:
        error: A foreign error.
        maybe_done: Whether the command had been sent. This only counts if the connection failed: a server that replies
            with an error has not run the command.
        where: The server, for people (`Endpoint.masked_url`).
    """
    match error:
        case BrokerError():
            return error
        case hiredis.ReplyError():
            return translate_reply(str(error), where=where)
        case TimeoutError():
            return BrokerUnavailable(f"broker {where} did not answer in time", maybe_done=maybe_done)
        case OSError():
            return _make_unreachable(where, _reason(error), maybe_done=maybe_done)
        case _:
            # Trio's broken and closed resources, a protocol error: the connection has ended.
            return BrokerUnavailable(f"broker {where} was cut off: {_reason(error)}", maybe_done=maybe_done)


def _make_unreachable(where: str, reason: str, *, maybe_done: bool) -> BrokerUnavailable:
    """Return the error for a broker that cannot be reached, with a hint if its URL is only the default."""
    hint = " (the default: set CELERY5_BROKER or App(broker=...))" if where == DEFAULT_URL else ""
    return BrokerUnavailable(f"broker {where} cannot be reached: {reason}{hint}", maybe_done=maybe_done)


ASK_MEMORY: Final = ("INFO", "memory")
"""The command that reads how full the memory of a server is."""


def translate_reply(text: str, *, where: str, script: Script | None = None) -> BrokerError:
    """Return the error for an error reply, whose first word decides (`-LOADING Redis is loading ...`).

    Args:
        text: The reply.
        where: The server, for people.
        script: The script that was called, if one was.
    """
    if _DENIED_IN_SCRIPT.search(text):
        return BrokerDenied(
            f"broker {where} does not permit {_describe_denied(text, script)} to the user: extend the user's ACL as "
            f"`celery5 acl` says ({escape_text(collapse_whitespace(text))[:MAX_ERROR_LENGTH]})"
        )
    match = _INSIDE_SCRIPT.match(text) or _RAISED_AGAIN.match(text)
    if match:
        text = match.group(1)
    text = escape_text(collapse_whitespace(text))
    code, _, rest = text.partition(" ")
    if code == "LOADING":
        return BrokerLoading(f"broker {where} is still loading its data; try again soon")
    if code == "READONLY":
        return BrokerReadOnly(f"broker {where} is a read-only replica; the broker URL must name the master")
    if code in _NOT_NOW:
        kind = SlotUnstable if code in _UNSTABLE else BrokerUnavailable
        return kind(f"broker {where} {_NOT_NOW[code]}; try again soon")
    if code in _OF_A_CLUSTER:
        return _make_cluster_error(text, where=where)
    if code in _DENIED:
        # NOAUTH needs no text of the server: for HELLO it is a paragraph on the options of HELLO.
        return BrokerDenied(f"broker {where} {_DENIED[code]}{'' if code == 'NOAUTH' else f' ({rest})'}")
    if code == "ERR" and any(rest.startswith(text) for text in _DENIED_TEXTS):
        return BrokerDenied(f"broker {where} refuses the login: {rest}")
    if code == "ERR" and rest.startswith("max number of clients"):
        return BrokerUnavailable(f"broker {where} has no connection left ({rest}); raise its maxclients")
    return _make_other(text, code=code, where=where)


class SlotUnstable(BrokerUnavailable):
    """The slot of the keys migrates, or has no primary at the moment: nothing was done."""


class SlotRedirected(BrokerUnsupported):
    """The slot of the keys is on another node: nothing was done. A driver for one server raises it unchanged."""

    def __init__(self, message: str, redirection: Redirection) -> None:
        self.redirection = redirection
        super().__init__(message)


def _make_cluster_error(text: str, *, where: str) -> BrokerError:
    """Return the error for a reply that only a cluster sends."""
    redirection = parse_redirection(text)
    if redirection is not None:
        return SlotRedirected(
            f"broker {where} answers as a Redis Cluster does ({text}): write redis+cluster://host:port with some of "
            "its nodes",
            redirection,
        )
    return BrokerUnsupported(
        f"broker {where} is part of a Redis Cluster, and one call has keys of several slots ({text})"
    )


def _make_other(text: str, *, code: str, where: str) -> BrokerReplied:
    """Return the error for a reply that has no class of its own."""
    if code == OUT_OF_MEMORY:
        return BrokerReplied(
            f"broker {where} takes no writes, since its memory is full ({text}): {MORE_MEMORY}. "
            "What was refused was not stored: send it again then",
            code=code,
        )
    return BrokerReplied(f"broker {where} answered: {text}", code=code)


def is_memory_refusal(error: BrokerError) -> bool:
    """Return whether the server has refused a write since its memory is full: then ASK_MEMORY says how full it is."""
    return isinstance(error, BrokerReplied) and error.code == OUT_OF_MEMORY


def describe_memory_refusal(error: BrokerError, info: Any) -> BrokerError:
    """Return the error of a write that was refused, with how full the server is, if that can be read.

    Args:
        error: An error of which `is_memory_refusal` is true.
        info: The reply to ASK_MEMORY, which may be an error.
    """
    memory = read_server_memory("", parse_info(info)) if isinstance(info, bytes) else None
    if memory is None or memory.limit is None:
        return error
    usage = f"Redis is full: {format_bytes(memory.used)} of {format_bytes(memory.limit)}"
    described = BrokerReplied(f"{usage}; {error}", code=OUT_OF_MEMORY)
    if error.maybe_done:
        described.mark_maybe_done()
    return described


def parse_info(raw: bytes) -> dict[str, str]:
    """Return the fields of an INFO."""
    lines = raw.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


def _describe_denied(text: str, script: Script | None) -> str:
    """Return which command in which script the user may not run, or on which key, as far as it is known."""
    found = _PLACE_IN_SCRIPT.search(text)
    named = _NAMED_COMMAND.search(text)
    command = named[1].upper() if named else ""
    if script is not None and found is not None and not command:
        lines = script.body.splitlines()[int(found[1]) - 1 : int(found[1])]
        command = ", ".join(sorted(find_lua_commands("".join(lines)))).upper().replace("|", " ")
    what = f"{command or 'a command'} in the script {script.name if script else 'that it called'}"
    return f"{what}, or its key or channel," if "access" in text else what


def unreadable_reply(call: Call[Any], error: Exception, *, where: str) -> BrokerError:
    """Return the error for a reply that the decoder of `call` could not read; the caller raises it `from` `error`."""
    if isinstance(error, BrokerError):
        return error
    command = call.script.name if call.script is not None else str(call.words[0])
    keys = [str(word) for word in call.words[1:] if str(word).startswith("celery5:")]
    about = f" about {keys[0]}" if keys else ""
    reason = escape_text(get_error_text(error, 200))
    unreadable = UnreadableReply(
        f"broker {where}: the reply to {command}{about} cannot be read ({type(error).__name__}: {reason}); "
        "another program may have written to this key"
    )
    unreadable.mark_maybe_done()  # there is a reply, so it may have run
    return unreadable


def _reason(error: Exception) -> str:
    """Return the text of the operating system or the TLS library, which Trio keeps in the cause."""
    cause = error.__cause__
    while isinstance(cause, BaseExceptionGroup):
        cause = cast("BaseExceptionGroup[BaseException]", cause).exceptions[0]
    for source in (cause, error):
        if isinstance(source, ssl.SSLError) and source.strerror:
            return source.strerror
        if isinstance(source, OSError) and source.errno and source.strerror:
            # By its number, since Trio adds the address to the text; negative numbers are the resolver's.
            return os.strerror(source.errno) if source.errno > 0 else source.strerror
    return get_error_text(error) or type(error).__name__
