"""Application: a processor that parks the keys of failing records, until a file says that it is mended."""

import os

import msgspec
import trio

from celery5 import App
from celery5.streams import Keep, Stream, StreamEvents


class Step(msgspec.Struct):
    """A record: one of the numbers 1, 2, 3, ... of its customer. Some fail."""

    customer: str
    number: int
    fails: bool = False


def declare_steps(app: App) -> tuple[Stream[Step], Stream[Step]]:
    """Declare what is read and what is written."""
    keep = Keep(records=100_000)
    return (
        app.stream("steps", Step, by="customer", partitions=4, keep=keep),
        app.stream("walked", Step, by="customer", partitions=2, keep=keep),
    )


app = App(os.environ.get("HISTORY_APP", "parking"))
steps, walked = declare_steps(app)


@app.processor(steps, into=walked, then="park-key")
async def walk(events: StreamEvents[Step]) -> None:
    """Send each record on."""
    async for step in events.records():
        await trio.sleep(0.002)
        if step.fails and not os.path.exists(os.environ["MENDED"]):  # noqa: ASYNC240  another process makes it
            raise ValueError("not mended")
        events.send(step)
