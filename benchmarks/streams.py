"""Measure streams beside what Redis itself allows: bare pipelined XADD, and bare XREAD with decoding.

Each round measures all of them in turn on one server, and the medians of the ratios count: the machine's own speed
changes between rounds. `nox -s bench -- streams` runs it; `streams.md` has what it printed last.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import redis
from server import Server

from celery5 import App
from celery5.streams import BlockingEvents, Keep, Record, StreamEvents

RECORDS = 200_000
PARTITIONS = 16
KEYS = 5_000
BATCH = 500


class Order(Record):
    """A small record."""

    order_id: int
    amount: int


app = App("bench-streams", broker=os.environ.get("CELERY5_BROKER"))
orders = app.stream("orders", Order, by="order_id", partitions=PARTITIONS, keep=Keep(records=10 * RECORDS))
rates: dict[str, list[float]] = {}
counted = 0
began = began_cpu = 0.0


def count(records: int) -> None:
    """Count what a processor has done; print the seconds and the CPU from the first record to the last."""
    global counted, began, began_cpu
    if not counted:
        began, began_cpu = time.perf_counter(), time.process_time()
    counted += records
    if counted >= RECORDS:
        used = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - began_cpu}
        print(json.dumps(used), flush=True)


HOW = os.environ.get("BENCH_STREAMS", "")
if HOW in ("records", "records on asyncio"):

    @app.processor(orders, name="reader", loop="asyncio" if HOW.endswith("asyncio") else "trio")
    async def read_records(events: StreamEvents[Order]) -> None:
        """Read records one by one."""
        async for _ in events.records():
            count(1)


if HOW == "records in threads":

    @app.processor(orders, name="reader")
    def read_blocking(events: BlockingEvents[Order]) -> None:
        """Read records one by one."""
        for _ in events.records():
            count(1)


if HOW == "batches":

    @app.processor(orders, name="reader")
    async def read_batches(events: StreamEvents[Order]) -> None:
        """Read records in batches."""
        async for batch in events.take(BATCH, within=0.1).records():
            count(len(batch))


def send(client: redis.Redis, records: list[Order]) -> float:
    """Send all records by a stream; return how many a second."""
    client.flushall()
    stream = App("bench-streams", broker=app.settings.broker).stream(
        "orders", Order, by="order_id", partitions=PARTITIONS, keep=Keep(records=10 * RECORDS)
    )
    start = time.perf_counter()
    for first in range(0, len(records), 5_000):
        stream.send(*records[first : first + 5_000])
    rate = len(records) / (time.perf_counter() - start)
    stream.app.connections.close()
    return rate


def add_bare(client: redis.Redis, records: list[Order]) -> float:
    """Append the same records by pipelined XADD; return how many a second."""
    encode = msgspec.json.Encoder().encode
    start = time.perf_counter()
    pipeline = client.pipeline(transaction=False)
    for number, record in enumerate(records, 1):
        pipeline.xadd(f"bare:{record.order_id % PARTITIONS}", {"=json": encode(record)})
        if number % BATCH == 0:
            pipeline.execute()
    pipeline.execute()
    rate = len(records) / (time.perf_counter() - start)
    client.delete(*[f"bare:{partition}" for partition in range(PARTITIONS)])
    return rate


def read_bare(client: redis.Redis) -> float:
    """Read and decode all records by XREAD; return how many a second."""
    decode = msgspec.json.Decoder(Order).decode
    positions = {orders.keys.log(partition): b"0-0" for partition in range(PARTITIONS)}
    found, start, cpu = 0, time.perf_counter(), time.process_time()
    while reply := client.xread(positions, count=256):
        for log, entries in reply:
            for _, fields in entries:
                decode(fields[b"=json"])
            found += len(entries)
            positions[log.decode()] = entries[-1][0]
    rates.setdefault("bare XREAD and decode: CPU, us a record", []).append(
        (time.process_time() - cpu) * 1e6 / found
    )
    return found / (time.perf_counter() - start)


def run_worker(client: redis.Redis, how: str, url: str) -> dict[str, float]:
    """Have a worker read all records; return how many a second, and its requests and CPU a record."""
    for key in client.scan_iter("*reader*", count=1000):
        client.delete(key)
    client.hdel(orders.keys.groups, "reader")
    client.config_resetstat()
    environment = {**os.environ, "BENCH_STREAMS": how, "CELERY5_BROKER": url}
    command = [sys.executable, "-m", "celery5", "-A", "streams", "worker", "start", "--log-level", "error"]
    with subprocess.Popen(
        command, cwd=Path(__file__).parent, env=environment, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        used = json.loads(worker.stdout.readline())
        stats = client.info("commandstats")
        worker.terminate()
    requests = sum(
        stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval", "xread")
    )
    return {
        how: RECORDS / used["seconds"],
        f"{how}: requests a record": requests / RECORDS,
        f"{how}: CPU of the worker, us a record": used["cpu"] * 1e6 / RECORDS,
    }


def run_runnel(client: redis.Redis, python: str, url: str) -> dict[str, float]:
    """Have Runnel send and read a tenth of the records; return how many a second."""
    client.flushall()
    records = RECORDS // 10
    folder = Path(__file__).parent / "peers"
    environment = {
        **os.environ,
        "BENCH_URL": url,
        "BENCH_RECORDS": str(records),
        "BENCH_KEYS": str(KEYS),
        "PYTHONPATH": str(folder),
    }
    sent = subprocess.run(
        [python, str(folder / "runnel_app.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    command = [python, "-c", "from runnel.cli import cli; cli()", "worker", "runnel_app:app"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as worker:
        assert worker.stdout is not None
        used = json.loads(worker.stdout.readline())
        worker.kill()  # it writes a lot when it is terminated
    return {
        "Runnel, sending": records / json.loads(sent.stdout)["seconds"],
        "Runnel, record by record": records / used["seconds"],
        "Runnel: CPU of the worker, us a record": used["cpu"] * 1e6 / records,
    }


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runnel", help="A Python that has Runnel: 3.8, with runnel==0.1.0b1 and click<8.1.")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    records = [Order(order_id=number % KEYS, amount=number) for number in range(RECORDS)]
    with Server() as server, redis.Redis.from_url(server.url) as client:
        app.configure(broker=server.url)
        measures: dict[str, Callable[[], float]] = {
            "bare pipelined XADD": lambda: add_bare(client, records),
            "send in bulk": lambda: send(client, records),
            "bare XREAD and decode": lambda: read_bare(client),
        }
        for _ in range(rounds):
            for name, measure in measures.items():
                rates.setdefault(name, []).append(measure())
            for how in ("records", "batches", "records on asyncio", "records in threads"):
                for name, value in run_worker(client, how, server.url).items():
                    rates.setdefault(name, []).append(value)
            if arguments.runnel:
                for name, value in run_runnel(client, arguments.runnel, server.url).items():
                    rates.setdefault(name, []).append(value)
    print("| measure | median | lowest | highest |\n|---|---|---|---|")
    for name, found in rates.items():
        shown = [
            f"{value:,.4g}" if value < 100 else f"{value:,.0f}"
            for value in (statistics.median(found), min(found), max(found))
        ]
        print(f"| {name} | {' | '.join(shown)} |")
    for ours, bare in (
        ("send in bulk", "bare pipelined XADD"),
        ("records", "bare XREAD and decode"),
        ("batches", "bare XREAD and decode"),
    ):
        ratios = [our_rate / bare_rate for our_rate, bare_rate in zip(rates[ours], rates[bare], strict=True)]
        print(f"\n{ours}: {statistics.median(ratios):.2f} of {bare}")


if __name__ == "__main__":
    main()
