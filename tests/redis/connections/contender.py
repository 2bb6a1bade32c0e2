"""Contender: a process that is a Controller as far as leadership goes, and writes down each time that it acts.

The seconds are those of the clock by which it decides, which is the same in all processes of the machine, and from
before it asked whether it may.
"""

import os
import signal
import sys

import trio

from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import Keys
from celery5.broker.timing import Timing
from celery5.logs.log import Log, LogWriter
from celery5.services.controller.leadership import Leadership
from celery5.services.process.lease import now


async def act(one: Leadership, name: str, file: int) -> None:
    """Act again and again, while it may."""
    led = 0
    while True:
        asked, epoch = now(), one.epoch
        if one.has_valid_lease:
            os.write(file, f"{asked} {name} {epoch} act\n".encode())
        if led not in (0, epoch):
            os.write(file, f"{asked} {name} {led} lost\n".encode())
        led = epoch
        await trio.sleep(0.01)


async def main(app: str, url: str, name: str, path: str) -> None:
    """Lead or stand by until SIGTERM."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    log = Log(worker=name, app=app, kind="controller")
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async with trio.open_nursery() as around:
            redis = TrioRedis(endpoint=Endpoint.from_url(url), timing=Timing(), watch=lambda _event: None)
            await around.start(redis.run)
            async with trio.open_nursery() as nursery:
                one = Leadership(redis=redis, keys=Keys(app), worker=name, log=log)
                await nursery.start(one.run)
                nursery.start_soon(act, one, name, file)
                os.write(file, f"{now()} {name} 0 up\n".encode())
                async for _ in signals:
                    nursery.cancel_scope.cancel()
            around.cancel_scope.cancel()
    log.finish()


if __name__ == "__main__":
    with LogWriter(sys.stdout, level="debug"):
        _, of, where, name, history = sys.argv
        trio.run(main, of, where, name, history)
