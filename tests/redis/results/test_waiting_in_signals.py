"""Waiting in signal handlers: `get()` in a handler works while `get()` runs in the thread that it has interrupted."""

import sys

import pytest
import trio

from celery5 import App
from tests.redis.worker.workers import working

SCRIPT = """
import faulthandler, signal, sys, time
from celery5 import App, ResultTimeout

faulthandler.enable()
app = App(sys.argv[1], broker=sys.argv[2])

@app.task(name="nap")
async def nap(seconds: float) -> float: ...

how, got, depth = sys.argv[3], [], [0]

def handle(number, frame):
    if depth[0] == 3 or len(got) >= 300:
        return
    depth[0] += 1
    try:
        if how == "sent before":
            got.append(short.get(timeout=20))
        else:
            got.append(nap.delay(0.0).get(timeout=20))
    finally:
        depth[0] -= 1

nap.delay(0.0).get(timeout=20)  # a signal must not come in the middle of an import
short = nap.delay(0.0)
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.003)
outer = [nap.delay(0.5).get(timeout=20) for _ in range(4)]
signal.setitimer(signal.ITIMER_REAL, 0)
print(outer, len(got) > 5, set(got))
"""


@pytest.mark.parametrize("how", ["sent before", "sent in the handler"])
async def test_get_in_a_handler_and_the_get_that_it_interrupts_both_return(
    url: str, app_name: str, how: str
) -> None:
    app = App(app_name, broker=url)

    @app.task(name="nap")
    async def nap(seconds: float) -> float:
        await trio.sleep(seconds)
        return seconds

    async with working(app):
        done = await trio.run_process(
            [sys.executable, "-c", SCRIPT, app_name, url, how],
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
    assert done.stderr.decode() == ""
    assert done.returncode == 0
    assert done.stdout.decode() == "[0.5, 0.5, 0.5, 0.5] True {0.0}\n"
    app.close()
