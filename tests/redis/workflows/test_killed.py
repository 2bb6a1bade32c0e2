"""Workers are killed while runs are under way: each run comes to its end, and each node counts once."""

import signal
from collections import Counter

from celery5 import Workflow, group
from celery5.workflows import RunState
from tests.redis.commands.staff import Staff, wait_until

FLAGS = ("--queues", "default,far")


def until_ended(staff: Staff, count: int) -> None:
    """Wait until this many jobs have ended."""
    wait_until(lambda: len(staff.notes("end")) >= count)


def test_a_map_is_joined_once_when_a_worker_is_killed_again_and_again(staff: Staff) -> None:
    nap = staff.app.tasks["nap"]
    workers = [staff.start(*FLAGS) for _ in range(2)]
    run = (nap.map([0.005] * 900) >> nap.s(0.0)).start()
    for count in (150, 400, 650):
        until_ended(staff, count)
        workers.pop(0).signal(signal.SIGKILL)
        workers.append(staff.start(*FLAGS))
    run.get(timeout=60)
    status = run.status()
    assert (status.state, status.done, status.failed, status.active) == (RunState.SUCCESS, 901, 0, 0)
    ended = Counter(note.job for note in staff.notes("end"))
    assert len(ended) == 901
    # What ran on a killed worker ran again; nothing that was settled did.
    assert sum(ended.values()) < 901 + 3 * 200


def test_chains_across_two_queues_come_to_their_end_when_workers_are_killed(staff: Staff) -> None:
    near = staff.app.tasks["nap"]
    far = near.options(queue="far")
    workers = [staff.start(*FLAGS) for _ in range(2)]
    chains = []
    for _ in range(20):
        chain: Workflow[int] = near.s(0.01)
        for hop in range(12):
            chain = chain >> (far if hop % 2 else near).s(0.01)
        chains.append(chain)
    run = (group(chains) >> near.s(0.0)).start()
    for count in (60, 150):
        until_ended(staff, count)
        workers.pop(0).signal(signal.SIGKILL)
        workers.append(staff.start(*FLAGS))
    run.get(timeout=60)
    status = run.status()
    assert (status.state, status.done, status.active) == (RunState.SUCCESS, 20 * 13 + 1, 0)
    assert len({note.job for note in staff.notes("end")}) == 20 * 13 + 1
