"""Translate: every foreign error has one of ours, and says what to do in one line."""

import hiredis
import pytest
import trio

from celery5.broker.endpoint import Endpoint
from celery5.broker.translate import DEFAULT_URL, SlotRedirected, SlotUnstable, translate_error
from celery5.config.settings import Settings
from celery5.errors import (
    BrokerDenied,
    BrokerError,
    BrokerLoading,
    BrokerReadOnly,
    BrokerReplied,
    BrokerUnavailable,
    BrokerUnsupported,
    CircuitOpen,
)

REPLIES = [
    ("LOADING Redis is loading the dataset in memory", BrokerLoading),
    ("READONLY You can't write against a read only replica.", BrokerReadOnly),
    ("NOAUTH Authentication required.", BrokerDenied),
    ("WRONGPASS invalid username-password pair", BrokerDenied),
    ("NOPERM this user has no permissions", BrokerDenied),
    ("DENIED Redis is running in protected mode", BrokerDenied),
    ("ERR invalid password", BrokerDenied),
    ("ERR AUTH <password> called without any password configured for the default user.", BrokerDenied),
    ("ERR max number of clients reached", BrokerUnavailable),
    ("BUSY Redis is busy running a script.", BrokerUnavailable),
    ("MASTERDOWN Link with MASTER is down", SlotUnstable),
    ("TRYAGAIN Multiple keys request during rehashing of slot", SlotUnstable),
    ("CLUSTERDOWN Hash slot not served", SlotUnstable),
    ("BUSYGROUP Consumer Group name already exists", BrokerReplied),
    ("NOGROUP No such key", BrokerReplied),
    ("OOM command not allowed", BrokerReplied),
    ("ERR unknown command", BrokerReplied),
    # A cluster that a proxy hides in the handshake.
    ("MOVED 3999 127.0.0.1:6381", SlotRedirected),
    ("ASK 3999 127.0.0.1:6381", SlotRedirected),
    ("CROSSSLOT Keys in request don't hash to the same slot", BrokerUnsupported),
    # How Redis 6.2 tells what a command inside a script was answered.
    (
        "ERR Error running script (call to f_0): @user_script:1: @user_script: 1: -READONLY You can't",
        BrokerReadOnly,
    ),
    (
        "ERR Error running script (call to f_0): @user_script:1: @user_script: 1: -NOGROUP No such",
        BrokerReplied,
    ),
]


def test_error_of_a_missing_password_leaves_out_the_options_of_hello() -> None:
    reply = (
        "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH"
    )
    error = translate_error(hiredis.ReplyError(reply), maybe_done=False, where="redis://h")
    assert str(error) == "broker redis://h wants a password; put user and password into the broker URL"


@pytest.mark.parametrize(("reply", "ours"), REPLIES)
def test_the_first_word_of_an_error_reply_decides(reply: str, ours: type[BrokerError]) -> None:
    error = translate_error(hiredis.ReplyError(reply), maybe_done=True, where="redis://h")
    assert type(error) is ours
    assert not getattr(error, "maybe_done", False), (
        "a server that answers with an error has not run the command"
    )
    assert str(error).startswith("broker redis://h")
    if isinstance(error, BrokerReplied):
        assert error.code in reply


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (TimeoutError("timed out"), "did not answer in time"),
        (ConnectionRefusedError(111, "Connection refused"), "cannot be reached: Connection refused"),
        (trio.BrokenResourceError("gone"), "cut off: gone"),
        (trio.ClosedResourceError(), "cut off: ClosedResourceError"),
        (hiredis.ProtocolError("Protocol error,\ngot x"), "cut off: Protocol error, got x"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("maybe_done", [True, False])
def test_a_lost_connection_keeps_what_the_driver_knows(error: Exception, says: str, maybe_done: bool) -> None:
    ours = translate_error(error, maybe_done=maybe_done, where="redis://h")
    assert type(ours) is BrokerUnavailable
    assert ours.maybe_done is maybe_done
    assert says in str(ours)
    assert "\n" not in str(ours)


def test_missing_broker_setting_is_reported_with_the_default() -> None:
    assert Settings().broker == DEFAULT_URL
    refused = ConnectionRefusedError(111, "Connection refused")
    assert str(
        translate_error(refused, maybe_done=False, where=Endpoint.from_url(DEFAULT_URL).masked_url)
    ) == (
        "broker redis://127.0.0.1:6379/0 cannot be reached: Connection refused "
        "(the default: set CELERY5_BROKER or App(broker=...))"
    )
    elsewhere = Endpoint.from_url("redis://127.0.0.1:6379/1").masked_url
    assert "default" not in str(translate_error(refused, maybe_done=False, where=elsewhere))


def test_the_reason_under_a_general_error_is_told() -> None:
    error = OSError("all attempts to connect to h:1 failed")
    error.__cause__ = ExceptionGroup(
        "several", [ConnectionRefusedError(111, "Error connecting to ('h', 1): refused")]
    )
    assert "cannot be reached: Connection refused" in str(translate_error(error, maybe_done=False, where="h"))


def test_our_own_errors_pass() -> None:
    error = CircuitOpen("x")
    assert translate_error(error, maybe_done=True, where="h") is error
