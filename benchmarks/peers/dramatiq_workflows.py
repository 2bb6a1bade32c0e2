"""Dramatiq's composition: groups with a completion callback, whose body gets no results, and pipelines."""

import dramatiq
from contract import URL, Workflows, become, clock
from dramatiq.middleware import GroupCallbacks
from dramatiq.rate_limits.backends import RedisBackend as Limits
from dramatiq_app import broker
from stamps import done

LIMIT = 60_000
"""Milliseconds."""
broker.add_middleware(GroupCallbacks(Limits(url=URL)))


@dramatiq.actor
def member(n: int) -> int:
    """Be a member of a group: its result is not stored, since a callback does not get it."""
    done()
    return n + 1


@dramatiq.actor(store_results=True)
def body() -> int:
    """End a group."""
    return 0


@dramatiq.actor(store_results=True)
def inc(n: int) -> int:
    """Return the next number."""
    done()
    return n + 1


def run_group(n: int) -> None:
    """Run a group and wait for its callback."""
    group = dramatiq.group([member.message(i) for i in range(n)])
    end = body.message()
    group.add_completion_callback(end)
    group.run()
    end.get_result(block=True, timeout=LIMIT)


def fan_in(n: int, laps: int) -> None:
    """Run groups."""
    run_group(10)
    for _ in range(laps):
        with clock.lap():
            run_group(n)


def run_chain(n: int) -> "dramatiq.pipeline":
    """Start a pipeline of n jobs."""
    return dramatiq.pipeline([inc.message(0), *[inc.message() for _ in range(n - 1)]]).run()


def chain(n: int, laps: int) -> None:
    """Run pipelines one after another."""
    run_chain(5).get_result(block=True, timeout=LIMIT)
    for _ in range(laps):
        with clock.lap():
            result = run_chain(n).get_result(block=True, timeout=LIMIT)
        assert result == n


def chains(count: int, n: int) -> None:
    """Start many pipelines."""
    broker.client.ping()
    clock.start()
    for _ in range(count):
        run_chain(n)


def worker(processes: int, concurrency: int) -> None:
    """Its own command."""
    become("dramatiq", "dramatiq_workflows", "--processes", str(processes), "--threads", str(concurrency))


workflows = Workflows(fan_in, chain, chains, worker)
