"""Application: a processor that sums up by key, as a worker of the tests runs it, and one that commits by itself."""

import os
import signal
import time

import msgspec
import trio

from celery5 import App, RetryPolicy
from celery5.streams import Keep, Stream, StreamEvents
from celery5.streams.processor import NO_RETRIES

PARTITIONS = 8
PACE = float(os.environ.get("STREAM_PACE", "0.002"))
"""Seconds that a record takes."""


class Payment(msgspec.Struct):
    """A record: one of the numbers 1, 2, 3, ... of its customer."""

    customer: str
    number: int
    # A file for which the processor waits, and seconds for which it blocks the loop.
    gate: str = ""
    block: float = 0.0
    # Whether it kills its worker.
    kills: bool = False


class Total(msgspec.Struct):
    """An output: all numbers of the customer so far."""

    customer: str
    number: int
    total: int


def declare_payments(app: App) -> Stream[Payment]:
    """Declare the stream that is read."""
    return app.stream("payments", Payment, by="customer", partitions=PARTITIONS, keep=Keep(records=100_000))


def declare_totals(app: App) -> Stream[Total]:
    """Declare the stream that is written."""
    return app.stream("totals", Total, by="customer", partitions=3, keep=Keep(records=100_000))


def note(payment: Payment, partition: int) -> None:
    """Write one line in one piece: customer, number, partition, process, time."""
    line = f"{payment.customer} {payment.number} {partition} {os.getpid()} {time.time():.6f}\n"
    file = os.open(os.environ["HISTORY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


async def work(payment: Payment, partition: int) -> None:
    """Do what a record asks for."""
    note(payment, partition)
    await trio.sleep(PACE)
    if payment.kills:
        os.kill(os.getpid(), signal.SIGKILL)
    if payment.block:
        time.sleep(payment.block)  # noqa: ASYNC251  that is what it is for
    while payment.gate and not os.path.exists(payment.gate):  # noqa: ASYNC240  another process makes it
        await trio.sleep(0.005)


def built(name: str, *, commits_apart: bool) -> App:
    """The application; `commits_apart`: the control, whose outputs are not committed with the cursor."""
    app = App(name)
    payments, totals = declare_payments(app), declare_totals(app)

    # The control cannot send while Redis is unreachable.
    policy = (
        RetryPolicy(max_retries=1000, backoff=0.05, step=0, jitter=False) if commits_apart else NO_RETRIES
    )

    @app.processor(payments, into=totals, name="bill", on_error=policy)
    async def bill(events: StreamEvents[Payment]) -> None:
        async for payment in events.records():
            await work(payment, events.partition)
            total = await events.state.get(payment.customer, 0) + payment.number
            events.state.set(payment.customer, total)
            output = Total(payment.customer, payment.number, total)
            if commits_apart:
                await totals.asend(output)
            else:
                events.send(output)

    return app


app = built(os.environ.get("HISTORY_APP", "streams"), commits_apart="STREAM_CONTROL" in os.environ)
