"""Translate: the one door through which foreign errors become errors of celery5.

redis-py, hiredis, the operating system and Trio each have their own words for "the broker is gone". All
drivers pass what they catch through `translated`, so that nobody above this room needs to know any of them.
"""

import os
import re
import ssl
from typing import Any, cast

import hiredis
import redis.exceptions

from celery5.broker.call import Call
from celery5.errors import (
    BrokerDenied,
    BrokerError,
    BrokerLoading,
    BrokerReadOnly,
    BrokerReplied,
    BrokerUnavailable,
    UnreadableReply,
)
from celery5.protocol.masking import escape_text

# Redis 6.2 wraps what a command inside a script answered; later servers pass it on as it is.
_INSIDE_SCRIPT = re.compile(r"^ERR Error running script .*@user_script: ?\d+: -?([A-Z]{3,} .*)$", re.DOTALL)

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
_DENIED = {
    "NOAUTH": "wants a password: put user and password into the broker URL",
    "WRONGPASS": "refuses this user or password: check both in the broker URL",
    "NOPERM": "does not permit this to the user: extend the user's ACL",
    "DENIED": "is in protected mode: set a password, or bind it to an address",
}

DEFAULT_URL = "redis://127.0.0.1:6379/0"
"""Where the broker is looked for when nobody says where it is."""


def translate_error(error: Exception, *, maybe_done: bool, where: str) -> BrokerError:
    """The error of celery5 for `error`; the caller raises it `from` the original.

    `maybe_done`: the command had left us when the error came. It only counts when the connection failed: a
    server that answers with an error has not run the command. `where` names the server, for people
    (`Endpoint.masked`).
    """
    match error:
        case BrokerError():
            return error
        case hiredis.ReplyError():
            return translate_reply(str(error), where=where)
        case redis.exceptions.ResponseError() | redis.exceptions.BusyLoadingError():
            return translate_reply(_full_text(error), where=where)
        case redis.exceptions.ConnectionError() if _full_text(error).startswith("ERR "):
            return translate_reply(_full_text(error), where=where)
        case redis.exceptions.AuthenticationError() | redis.exceptions.AuthorizationError():
            return translate_reply(_full_text(error), where=where)
        case redis.exceptions.DataError():
            return BrokerReplied(f"broker {where}: this cannot be sent: {error}", code="DATA")
        case redis.exceptions.TimeoutError() | TimeoutError():
            return BrokerUnavailable(f"broker {where} did not answer in time", maybe_done=maybe_done)
        case redis.exceptions.ConnectionError() if isinstance(why := _while_connecting(error), OSError):
            return _out_of_reach(where, _reason(why), maybe_done=maybe_done)
        case OSError():
            return _out_of_reach(where, _reason(error), maybe_done=maybe_done)
        case _:
            # redis-py's ConnectionError, Trio's broken and closed resources, a protocol error: the connection
            # is over.
            return BrokerUnavailable(f"broker {where} was cut off: {_reason(error)}", maybe_done=maybe_done)


def _out_of_reach(where: str, why: str, *, maybe_done: bool) -> BrokerUnavailable:
    """Whoever has never said where the broker is, is told that this is only where it is looked for."""
    forgotten = " (the default: set CELERY5_BROKER or App(broker=...))" if where == DEFAULT_URL else ""
    return BrokerUnavailable(f"broker {where} cannot be reached: {why}{forgotten}", maybe_done=maybe_done)


def translate_reply(text: str, *, where: str) -> BrokerError:
    """The error for an error reply, whose first word decides (`-LOADING Redis is loading ...`)."""
    inside = _INSIDE_SCRIPT.match(text)
    if inside:
        text = inside.group(1)
    text = escape_text(" ".join(text.split()))
    code, _, rest = text.partition(" ")
    if code == "LOADING":
        return BrokerLoading(f"broker {where} is still loading its data; try again soon")
    if code == "READONLY":
        return BrokerReadOnly(f"broker {where} is a read-only replica; the broker URL must name the master")
    if code in _NOT_NOW:
        return BrokerUnavailable(f"broker {where} {_NOT_NOW[code]}; try again soon")
    if code in _DENIED:
        return BrokerDenied(f"broker {where} {_DENIED[code]} ({rest})")
    if code == "ERR" and any(rest.startswith(denied) for denied in _DENIED_TEXTS):
        return BrokerDenied(f"broker {where} refuses the login: {rest}")
    if code == "ERR" and rest.startswith("max number of clients"):
        return BrokerUnavailable(f"broker {where} has no connection left ({rest}); raise its maxclients")
    return BrokerReplied(f"broker {where} answered: {text}", code=code)


def unreadable_reply(call: Call[Any], error: Exception, *, where: str) -> BrokerError:
    """Return the error for a reply that the decoder of `call` could not read; the caller raises it `from` `error`."""
    if isinstance(error, BrokerError):
        return error
    command = call.script.name if call.script is not None else str(call.words[0])
    keys = [str(word) for word in call.words[1:] if str(word).startswith("celery5:")]
    about = f" about {keys[0]}" if keys else ""
    why = escape_text(" ".join(str(error).split())[:200])
    unreadable = UnreadableReply(
        f"broker {where}: the reply to {command}{about} cannot be read ({type(error).__name__}: {why}); "
        "another program may have written to this key"
    )
    unreadable.mark_maybe_done()  # it was answered, so it may have run
    return unreadable


def _while_connecting(error: Exception) -> BaseException | None:
    """What redis-py met while it connected; it keeps that in the context, and says so in its text only."""
    return error.__context__ if " connecting to " in str(error) else None


def _reason(error: Exception) -> str:
    """The operating system's or the TLS library's own words, which Trio keeps in the cause."""
    cause = error.__cause__
    while isinstance(cause, BaseExceptionGroup):
        cause = cast("BaseExceptionGroup[BaseException]", cause).exceptions[0]
    for each in (cause, error):
        if isinstance(each, ssl.SSLError) and each.strerror:
            return each.strerror
        if isinstance(each, OSError) and each.errno and each.strerror:
            # The number, since Trio puts the address into the text; negative ones are of the resolver.
            return os.strerror(each.errno) if each.errno > 0 else each.strerror
    return " ".join(str(error).split()) or type(error).__name__


def _full_text(error: Exception) -> str:
    """An error reply as the server sent it: redis-py cuts the first word off and keeps it in `status_code`."""
    code = getattr(error, "status_code", None)
    return f"{code} {error}" if code else str(error)
