"""The resources of a box: checked before a job, and opened again by their policies, as those of a worker are."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio

from celery5 import RetryPolicy, SoftTimeLimitExceeded
from celery5.errors import ResourceUnavailable
from celery5.runners import open_resources
from celery5.runners.context import LOG_EVENT
from celery5.runners.open_resources import BoxResources
from celery5.tasks import Resource

POLICY = RetryPolicy(max_retries=2, backoff=1.0, cap=8.0, jitter=False)


class Clock:
    """A clock that goes on when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps: list[float] = []

    def monotonic(self) -> float:
        """The time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let it pass."""
        if seconds:
            self.sleeps.append(seconds)
            self.now += seconds

    async def sleep_async(self, seconds: float) -> None:
        """Let it pass, on an event loop."""
        self.sleep(seconds)


class Vault:
    """What is opened, again and again, and how that goes."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.broken = set[str]()
        self.failures: list[Exception] = []
        self.check_error: BaseException | None = None
        self.close_error: Exception | None = None

    def open(self) -> Iterator[str]:
        """Open the next one."""
        if self.failures:
            raise self.failures.pop(0)
        name = f"bank {len(self.opened)}"
        self.opened.append(name)
        yield name
        self.closed.append(name)
        if self.close_error is not None:
            raise self.close_error

    def check(self, name: str) -> bool | None:
        """Return whether it is well."""
        if self.check_error is not None:
            raise self.check_error
        return False if name in self.broken else None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(open_resources, "time", clock)
    monkeypatch.setattr(trio, "sleep", clock.sleep_async)
    monkeypatch.setattr(asyncio, "sleep", clock.sleep_async)
    return clock


@pytest.fixture
def events() -> Iterator[list[tuple[str, Any]]]:
    """What is logged, and the delay or the reason that is in it."""
    noted: list[tuple[str, Any]] = []

    def log(event: str, _level: str, /, **fields: Any) -> None:
        assert fields["resource"] == "bank"
        noted.append((event, fields.get("again_in", fields["why"])))

    token = LOG_EVENT.set(log)
    yield noted
    LOG_EVENT.reset(token)


@pytest.fixture
def vault() -> Vault:
    return Vault()


@pytest.fixture
def resource(vault: Vault) -> Resource:
    return Resource(vault.open, name="bank", check=vault.check, check_interval=30, retry=POLICY)


def test_a_broken_resource_is_closed_and_opened_again_once_its_interval_has_passed(
    clock: Clock, vault: Vault, resource: Resource, events: list[Any]
) -> None:
    box = BoxResources()
    assert box.find(resource) == "bank 0"
    vault.broken.add("bank 0")
    clock.now += 29.9
    assert box.find(resource) == "bank 0", "it is not checked before each job"
    clock.now += 0.2
    assert box.find(resource) == "bank 1"
    assert (vault.closed, clock.sleeps) == (["bank 0"], [1.0])
    assert events == [("resource:failed", 1.0)]
    box.close()
    assert vault.closed == ["bank 0", "bank 1"]


def test_a_check_that_passes_counts_for_an_interval(clock: Clock, vault: Vault, resource: Resource) -> None:
    box = BoxResources()
    box.find(resource)
    clock.now += 30
    box.find(resource)
    vault.broken.add("bank 0")
    clock.now += 29
    assert box.find(resource) == "bank 0"
    clock.now += 1
    assert box.find(resource) == "bank 1"


@pytest.mark.parametrize("run", [trio.run, lambda function: asyncio.run(function())])
def test_jobs_on_event_loops_share_it_and_sleep_there(
    clock: Clock, vault: Vault, resource: Resource, run: Any
) -> None:
    box = BoxResources()

    async def find() -> Any:
        async with AsyncExitStack() as stack:
            return await box.find_async(resource, stack)

    assert (run(find), box.find(resource)) == ("bank 0", "bank 0")
    vault.check_error = OSError("gone")
    clock.now += 31
    assert (run(find), clock.sleeps, vault.closed) == ("bank 1", [1.0], ["bank 0"])


def test_one_that_was_open_is_tried_again_by_its_delays_until_the_job_has_waited_enough(
    clock: Clock, vault: Vault, resource: Resource, events: list[Any]
) -> None:
    box = BoxResources()
    box.find(resource)
    vault.broken.add("bank 0")
    vault.failures = [OSError(f"no host, try {n}") for n in range(9)]
    clock.now += 31
    with pytest.raises(ResourceUnavailable, match=r"resource 'bank': OSError: no host, try \d"):
        box.find(resource)
    assert clock.sleeps == [1.0, 2.0, 4.0, 8.0, 8.0]
    assert [delay for _event, delay in events] == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    # The next job waits for the rest of the delay, and then it is open.
    vault.failures = []
    clock.sleeps.clear()
    clock.now += 5
    assert (box.find(resource), clock.sleeps) == ("bank 1", [3.0])


def test_one_that_has_never_been_open_is_tried_again_as_often_as_its_policy_says(
    clock: Clock, vault: Vault, resource: Resource
) -> None:
    vault.failures = [OSError("no host")] * 3
    box = BoxResources()
    with pytest.raises(ResourceUnavailable, match="resource 'bank': OSError: no host"):
        box.find(resource)
    assert clock.sleeps == [1.0, 2.0]
    vault.failures = [OSError("no host")]
    assert BoxResources().find(resource) == "bank 0"


def test_failures_of_one_that_was_open_for_long_do_not_count(
    clock: Clock, vault: Vault, resource: Resource
) -> None:
    box = BoxResources()
    for seconds in (31, 31, 61):
        name = box.find(resource)
        vault.broken.add(name)
        clock.now += seconds
        box.find(resource)
    assert clock.sleeps == [1.0, 2.0, 1.0]


def test_a_time_limit_in_the_middle_of_a_check_is_one_of_the_job(
    clock: Clock, vault: Vault, resource: Resource, events: list[Any]
) -> None:
    box = BoxResources()
    box.find(resource)
    clock.now += 31
    vault.check_error = SoftTimeLimitExceeded("too long")
    with pytest.raises(SoftTimeLimitExceeded):
        box.find(resource)
    vault.check_error = None
    assert (box.find(resource), events) == ("bank 0", [])


def test_an_error_of_closing_a_broken_one_is_logged(
    clock: Clock, vault: Vault, resource: Resource, events: list[Any]
) -> None:
    box = BoxResources()
    vault.close_error = OSError("gone")
    vault.broken.add(box.find(resource))
    clock.now += 31
    assert box.find(resource) == "bank 1"
    assert events == [("resource:failed", 1.0), ("resource:close-failed", "OSError: gone")]
    other = Resource(Vault().open, name="other")
    box.find(other)
    with pytest.raises(OSError, match="gone"):
        box.close()
