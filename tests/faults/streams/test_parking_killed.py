"""Workers are killed while keys are parked and released: each record counts once, in the order of its key."""

import signal
import sys
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest

from tests.faults.streams.parking import Step, declare_steps
from tests.redis.commands.staff import Employee, Staff, wait_until

CUSTOMERS = 12
ROUNDS = 60


def start(staff: Staff, name: str) -> Employee:
    """Start a worker of the application."""
    target = ("-m", "celery5", "-A", "tests.faults.streams.parking:app")
    return staff.launch([sys.executable, *target, "worker", "start", "--name", name], lease=1.0)


def make_steps(first: int, last: int) -> list[Step]:
    """Return records of all customers; of every third one some fail."""
    return [
        Step(f"c{customer}", number, fails=customer % 3 == 0 and number % 20 == 7)
        for number in range(first, last)
        for customer in range(CUSTOMERS)
    ]


def test_each_record_counts_once_in_the_order_of_its_key(
    staff: Staff, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mended = tmp_path / "mended"
    monkeypatch.setenv("MENDED", str(mended))
    app = staff.app
    steps, _ = declare_steps(app)

    def read_walked() -> dict[str, list[int]]:
        found = defaultdict[str, list[int]](list)
        for stored in app.streams.read("walked", "earliest"):
            step = msgspec.convert(stored.record, Step)
            found[step.customer].append(step.number)
        return found

    def count_parked() -> int:
        return sum(key.records for key in app.streams.parked_keys.read("steps", "walk"))

    def has_walked(count: int) -> bool:
        return sum(stream.records for stream in app.streams.info() if stream.stream == "walked") >= count

    steps.send(*make_steps(0, ROUNDS // 2))
    workers = [start(staff, "one"), start(staff, "two")]
    wait_until(lambda: has_walked(100))
    workers[0].signal(signal.SIGKILL)
    workers.append(start(staff, "three"))
    steps.send(*make_steps(ROUNDS // 2, ROUNDS))
    wait_until(lambda: count_parked() > 30)
    workers[1].signal(signal.SIGKILL)
    parked = 4 * (ROUNDS - 7)
    wait_until(lambda: count_parked() == parked)
    assert all(numbers == list(range(len(numbers))) for numbers in read_walked().values())

    mended.touch()
    assert app.streams.parked_keys.release("steps", "walk") == 4
    steps.send(*make_steps(ROUNDS, ROUNDS + 20))
    wait_until(lambda: count_parked() < parked - 20)
    workers[2].signal(signal.SIGKILL)
    start(staff, "four")
    wait_until(lambda: has_walked(CUSTOMERS * (ROUNDS + 20)) and not count_parked())
    assert read_walked() == {f"c{n}": list(range(ROUNDS + 20)) for n in range(CUSTOMERS)}
