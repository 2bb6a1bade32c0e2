"""Measure the dashboard: how long pages take with many jobs, its memory, and what ten tabs cost.

    nox -s bench -- dashboard --queued 1000000 --dead 100000 --seconds 60

A real server, a real process of the dashboard, and clients that ask for pages as tabs do: each page every two seconds.
With `--workers 10000 --queues 1000` so many simulated workers report beside it, from `benchmarks/reports.py`.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from urllib.request import HTTPCookieProcessor, OpenerDirector, Request, build_opener

import redis

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer

SHOP = """
from celery5 import App

app = App("shop", metrics_interval=15)


@app.task(queue="mail")
async def send(number: int) -> None: ...


@app.task(queue="money", max_retries=0)
async def charge(order: int) -> None:
    raise ValueError(f"card of order {order} was refused by bank {'ABCDEFGH'[order % 8]}")
"""
FILL = """
import sys
from shop import app, charge, send
dead, queued = int(sys.argv[1]), int(sys.argv[2])
for task, count in ((charge, dead), (send, queued)):
    for start in range(0, count, 10000):
        app.send_many([task.s(number) for number in range(start, min(start + 10000, count))])
"""
PAGES = (
    "", "/alerts", "/tasks", "/tasks/shop.charge", "/queues", "/queues/money", "/jobs", "/jobs?task=shop.charge",
    "/dead", "/dead/jobs", "/bulk", "/workers", "/schedules", "/events", "/streams", "/workflows", "/limits",
    "/storage", "/audit",
)  # fmt: skip
HEAD_START = 60.0
"""Seconds for which simulated workers report longer than is measured: a rollup comes every 15 s."""
LONGEST_START = 180.0
"""Seconds in which the first rollup must come."""
SLOW = 2000
"""Microseconds above which the server notes a command."""


def main() -> None:
    """Fill an application, start its dashboard, and print what it takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--queued", type=int, default=100_000)
    parser.add_argument("--dead", type=int, default=10_000)
    parser.add_argument("--tabs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=0, help="simulated workers that report")
    parser.add_argument("--queues", type=int, default=1000, help="queues of the simulated workers")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with EmbeddedServer.start() as server, tempfile.TemporaryDirectory() as folder:
        client = redis.Redis.from_url(server.url)
        (Path(folder) / "shop.py").write_text(SHOP)
        environ = {**os.environ, "CELERY5_BROKER": server.url}
        fill(folder, environ, options)
        client.config_set("slowlog-log-slower-than", SLOW)
        client.slowlog_reset()
        log = Path(folder) / "dashboard.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "celery5", "-A", "shop", "dashboard", "start", "--port", "0"],
                cwd=folder, env=environ, stdout=subprocess.DEVNULL, stderr=output,
            )  # fmt: skip
        try:
            with simulate_workers(server.url, options) as rolled_up:
                figures = measure(process.pid, sign_in(log), client, options)
            figures |= rolled_up
        finally:
            process.terminate()
            process.wait()
    if options.json:
        print(json.dumps(figures))
    else:
        show(figures)


@contextmanager
def simulate_workers(url: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Have simulated workers report, and begin when the first of their reports are rolled up.

    Yields:
        What came of it, empty until the end.
    """
    rolled_up: dict[str, Any] = {}
    if not options.workers:
        yield rolled_up
        return
    command = [sys.executable, str(Path(__file__).with_name("reports.py")), "--broker", url, "--app", "shop"]
    command += ["--workers", str(options.workers), "--queues", str(options.queues)]
    command += ["--json", "--seconds", str(options.seconds + HEAD_START)]
    client, state = redis.Redis.from_url(url), App("shop", broker=url).keys.metrics_state
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + LONGEST_START
        while not client.hexists(state, "cursor") and time.monotonic() < deadline:
            time.sleep(0.5)
        try:
            yield rolled_up
            output, _ = process.communicate(timeout=300)
            rolled_up["workers"] = json.loads(output)
        finally:
            process.terminate()


def fill(folder: str, environ: dict[str, str], options: argparse.Namespace) -> None:
    """Have jobs die, and have others wait."""
    run = [sys.executable, "-c", FILL]
    subprocess.run([*run, str(options.dead), "0"], cwd=folder, env=environ, check=True)
    work = [sys.executable, "-m", "celery5", "-A", "shop", "worker", "start", "--queues", "money", "--burst"]
    subprocess.run(
        [*work, "--log-level", "error"], cwd=folder, env=environ, check=True, stdout=subprocess.DEVNULL
    )
    subprocess.run([*run, "0", str(options.queued)], cwd=folder, env=environ, check=True)


def sign_in(log: Path) -> tuple[OpenerDirector, str]:
    """Return a client that is signed in, and the address of the application."""
    while not (found := re.search(r"(http://\S+)/sign-in\?token=\S+", log.read_text())):
        time.sleep(0.1)
    opener = build_opener(HTTPCookieProcessor())
    opener.open(found[0]).read()
    return opener, f"{found[1]}/shop"


def measure(
    pid: int, signed_in: tuple[OpenerDirector, str], client: redis.Redis, options: argparse.Namespace
) -> dict[str, Any]:
    """Look at all pages as several tabs do, and return times, memory and CPU."""
    opener, root = signed_in
    times: dict[str, list[float]] = {page: [] for page in PAGES}
    first = {page: ask(opener, root + page) for page in PAGES}
    sizes, cpu, began = [get_memory(pid)], get_cpu(pid), time.monotonic()
    client.config_resetstat()

    def look(number: int) -> None:
        turn = number
        while time.monotonic() < began + options.seconds:
            page = PAGES[turn % len(PAGES)]
            times[page].append(ask(opener, root + page))
            turn += 1
            time.sleep(2.0)

    with ThreadPoolExecutor(options.tabs) as pool:
        tabs = [pool.submit(look, number * 2) for number in range(options.tabs)]
        while time.monotonic() < began + options.seconds:
            time.sleep(min(options.seconds / 10, 60.0))
            sizes.append(get_memory(pid))
        for tab in tabs:
            tab.result()
    elapsed = time.monotonic() - began
    stats: dict[str, Any] = client.info("commandstats")  # type: ignore[assignment]
    commands = {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in stats.items()}
    # The simulation of workers has lower calls noted, too.
    slow = [
        call for call in cast("list[dict[str, Any]]", client.slowlog_get(5000)) if call["duration"] > SLOW
    ]
    return {
        "pages": {page: describe(first[page], seen) for page, seen in times.items()},
        "p95 of all pages, ms": get_percentile(
            [duration for seen in times.values() for duration in seen], 0.95
        ),
        "looks": sum(map(len, times.values())),
        "memory, MiB": [round(size / 2**20) for size in sizes],
        "share of a core": (get_cpu(pid) - cpu) / elapsed,
        "commands a second, with those of scripts": sum(commands.values()) / elapsed,
        "commands that walk all keys": commands.get("keys", 0),
        "scans a look at the storage": commands.get("scan", 0) / max(len(times["/storage"]), 1),
        f"calls above {SLOW / 1000:g} ms": len(slow),
        "the longest, ms": max((call["duration"] for call in slow), default=0) / 1000,
    }


def describe(first: float, seen: list[float]) -> dict[str, float]:
    """Return the first time of a page, and percentiles of the others, in ms."""
    seen = seen or [first]
    return {"first": first * 1000, "p50": get_percentile(seen, 0.5), "p95": get_percentile(seen, 0.95)}


def get_percentile(seconds: list[float], share: float) -> float:
    """Return the percentile of times, in ms."""
    return sorted(seconds)[min(len(seconds) - 1, int(len(seconds) * share))] * 1000


def show(figures: dict[str, Any]) -> None:
    """Print the figures for people."""
    for page, took in figures["pages"].items():
        words = "".join(f"  {name} {ms:6.0f} ms" for name, ms in took.items())
        print(f"{page or '/':24}{words}")
    for name, value in figures.items():
        if name != "pages":
            print(f"{name}: {value:,.2f}" if isinstance(value, float) else f"{name}: {value}")


def ask(opener: OpenerDirector, url: str) -> float:
    """Return the seconds that a page takes."""
    began = time.monotonic()
    opener.open(Request(url, headers={"X-Part": "main"}), timeout=60).read()
    return time.monotonic() - began


def get_memory(pid: int) -> int:
    """Return the bytes that a process has in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def get_cpu(pid: int) -> float:
    """Return the seconds of CPU that a process has used."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
