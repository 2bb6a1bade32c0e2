"""Publishing and waiting for replicas: one exchange, on one connection, done again after a script was unknown."""

from typing import Any

import pytest
from hiredis import ReplyError

from celery5.broker.call import Call
from celery5.broker.calls.jobs import publish, wait_for_replicas
from celery5.broker.connection.exchange import WireRequest, exchange_replicated
from celery5.broker.keys import Keys
from celery5.errors import BrokerDenied, BrokerReplied

QUEUE = Keys("shop").for_queue("mails")
CALLS: list[Call[int]] = [publish(QUEUE, [("a", b"{}")]), publish(QUEUE, [("b", b"{}")])]
WAITS = wait_for_replicas(QUEUE, replicas=1, within=1.0)
NOSCRIPT = ReplyError("NOSCRIPT No matching script. Please use EVAL.")


def commands(request: WireRequest) -> list[bytes]:
    """The names of the commands of a write."""
    names = (b"EVALSHA", b"EVAL", b"SET", b"WAIT")
    return [line for line in request.packed.split(b"\r\n") if line in names]


def converse(*replies: list[Any]) -> tuple[list[list[bytes]], Any]:
    """Hold an exchange with these replies; return the commands of each write, and what it returns."""
    exchange = exchange_replicated(CALLS, WAITS, reply_within=10.0, where="h")
    written = [next(exchange)]
    try:
        for raws in replies:
            written.append(exchange.send(raws))  # noqa: PERF401  the end of the exchange ends the loop
    except StopIteration as end:
        return [commands(request) for request in written], end.value
    raise AssertionError("it wants more replies")


def test_jobs_are_published_and_waited_for_in_one_write() -> None:
    written, (values, count) = converse([1, 1, b"OK", 2])
    assert written == [[b"EVALSHA", b"EVALSHA", b"SET", b"WAIT"]]
    assert (values, count) == ([1, 1], 2)


def test_replicas_are_waited_for_again_after_an_unknown_script() -> None:
    written, (values, count) = converse([1, NOSCRIPT, b"OK", 9], [1, b"OK", 0])
    assert written[1] == [b"EVAL", b"SET", b"WAIT"]
    assert (values, count) == ([1, 1], 0)  # the first answer of WAIT was too early


def test_a_refused_job_is_an_error_whatever_the_number_of_replicas() -> None:
    full = ReplyError("MISCONF the disk is full")
    with pytest.raises(BrokerReplied, match="MISCONF") as caught:
        converse([full, full, full, 1])
    assert not caught.value.maybe_done
    with pytest.raises(BrokerReplied, match="MISCONF") as caught:
        converse([1, full, full, 1])
    assert caught.value.maybe_done


def test_jobs_are_published_when_the_server_forbids_wait() -> None:
    values, why = converse([1, 1, b"OK", ReplyError("NOPERM no WAIT")])[1]
    assert values == [1, 1]
    assert isinstance(why, BrokerDenied)
