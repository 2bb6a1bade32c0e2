"""Measure how long partitions pause when a worker joins sixteen others that share 256 partitions.

Each worker is a process. Records come all the time, to all partitions in turn, and each is noted when it is processed:
how late it is then says how long its partition has paused. `nox -s bench -- rebalance` runs it.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import redis
from server import Server

from celery5 import App
from celery5.streams import Keep, StreamEvents

PARTITIONS = 256
MEMBERS = 16
ROUND = 0.1
"""Seconds in which each partition gets a record."""
LIMIT = 120.0
"""Seconds that each step may take."""

app = App("bench-rebalance", broker=os.environ.get("CELERY5_BROKER"))
numbers = app.stream("numbers", int, partitions=PARTITIONS, keep=Keep(records=100_000))


@app.processor(numbers, name="reader")
async def read(events: StreamEvents[int]) -> None:
    """Note each record: its partition, when it was sent, when it is processed, and by which process."""
    file = os.open(os.environ["BENCH_NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        async for entry in events:
            line = f"{entry.partition} {entry.time:.3f} {time.time():.3f} {os.getpid()}\n"
            os.write(file, line.encode())
    finally:
        os.close(file)


def start_worker(url: str, notes: Path) -> subprocess.Popen[bytes]:
    """Start a worker."""
    command = [sys.executable, "-m", "celery5", "-A", "rebalance", "worker", "start", "--log-level", "error"]
    environment = {**os.environ, "CELERY5_BROKER": url, "BENCH_NOTES": str(notes)}
    return subprocess.Popen(command, cwd=Path(__file__).parent, env=environment, stdout=subprocess.DEVNULL)


def get_owners(client: redis.Redis) -> dict[int, str]:
    """Return the owner of each partition that has one."""
    pipeline = client.pipeline(transaction=False)
    for partition in range(PARTITIONS):
        pipeline.hget(numbers.keys.partition("reader", partition), "owner")
    return {number: owner.decode() for number, owner in enumerate(pipeline.execute()) if owner}


def is_settled(client: redis.Redis, members: int) -> bool:
    """Whether all partitions have owners, as many as there are members, with fair shares."""
    owners = list(get_owners(client).values())
    shares = [owners.count(owner) for owner in set(owners)]
    return len(owners) == PARTITIONS and len(shares) == members and max(shares) - min(shares) <= 1


def send_until(client: redis.Redis, condition: Callable[[], bool]) -> None:
    """Send a record to each partition in each round, until a condition holds."""
    end = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("it did not settle")
        start = time.monotonic()
        numbers.send(*range(PARTITIONS))
        time.sleep(max(0.0, start + ROUND - time.monotonic()))


def measure(url: str, client: redis.Redis, folder: Path) -> tuple[float, list[float], list[float]]:
    """Return the seconds until all was settled, and how late records of each moved partition and of others were."""
    notes = folder / "notes"
    workers = [start_worker(url, notes) for _ in range(MEMBERS)]
    try:
        send_until(client, lambda: is_settled(client, MEMBERS))
        quiet = time.monotonic() + 3
        send_until(client, lambda: time.monotonic() > quiet)
        before = get_owners(client)
        workers.append(start_worker(url, notes))
        send_until(client, lambda: len(set(get_owners(client).values())) > MEMBERS)
        joined = time.time()
        send_until(client, lambda: is_settled(client, MEMBERS + 1))
        settled = time.time() - joined
        quiet = time.monotonic() + 2
        send_until(client, lambda: time.monotonic() > quiet)
        after = get_owners(client)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait(60)
    late: dict[int, float] = defaultdict(float)
    for line in notes.read_text().splitlines():
        partition, sent, done, _ = line.split()
        if joined - 1 < float(sent) < joined + 2:
            late[int(partition)] = max(late[int(partition)], float(done) - float(sent))
    moved = [late[partition] for partition in before if before[partition] != after[partition]]
    others = [late[partition] for partition in before if before[partition] == after[partition]]
    return settled, moved, others


def main() -> None:
    """Measure, and print what it was."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    settled, moved, others = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        with (
            Server() as server,
            redis.Redis.from_url(server.url) as client,
            tempfile.TemporaryDirectory() as folder,
        ):
            app.configure(broker=server.url)
            result = measure(server.url, client, Path(folder))
            settled.append(result[0])
            moved += result[1]
            others += result[2]
            app.close()
    print(
        f"settled after {statistics.median(settled):.2f} s (median of {rounds}; at most {max(settled):.2f} s)"
    )
    for name, found in ((f"{len(moved)} moved partitions", moved), (f"{len(others)} others", others)):
        cuts = statistics.quantiles(found, n=100)
        print(f"{name}: records late by {cuts[49] * 1000:.0f} ms (p50), {cuts[98] * 1000:.0f} ms (p99)")


if __name__ == "__main__":
    main()
