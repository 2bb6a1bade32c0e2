"""Runnel: send and process the same records. It is run by a Python of its own, of the versions that Runnel runs on."""

import asyncio
import json
import os
import time
from typing import Any

from runnel import App, Record

RECORDS = int(os.environ["BENCH_RECORDS"])
KEYS = int(os.environ["BENCH_KEYS"])
PORTION = 500

app = App(name="bench", redis_url=os.environ["BENCH_URL"], log_level="error")


class Order(Record):
    """A small record."""

    order_id: int
    amount: int


orders = app.stream("orders", record=Order, partition_by="order_id", partition_size=10 * RECORDS)
counted = 0
began = began_cpu = 0.0


@app.processor(orders)
async def reader(events: Any) -> None:
    """Read records one by one; print the seconds and the CPU from the first to the last."""
    global counted, began, began_cpu
    async for _ in events.records():
        if not counted:
            began, began_cpu = time.perf_counter(), time.process_time()
        counted += 1
        if counted == RECORDS:
            used = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - began_cpu}
            print(json.dumps(used), flush=True)


async def send() -> None:
    """Send all records; print the seconds."""
    records = [Order(order_id=number % KEYS, amount=number) for number in range(RECORDS)]
    start = time.perf_counter()
    for first in range(0, RECORDS, PORTION):
        await orders.send(*records[first : first + PORTION])
    print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    asyncio.run(send())
