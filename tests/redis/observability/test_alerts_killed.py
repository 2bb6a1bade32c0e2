"""Each alert fires once in a cluster, whoever of three workers is killed or frozen."""

import json
import signal
from collections import Counter
from functools import partial

import redis

from tests.redis.commands.staff import Employee, Staff, wait_until
from tests.redis.observability.alerted import QUICK, Receiver

RULES = json.dumps({"lonely": "no-workers for=0 keep_firing_for=0"})


def start(staff: Staff, receiver: Receiver) -> Employee:
    """Start a worker that evaluates alerts and reads one queue alone."""
    return staff.start(**{**QUICK, "alerts": RULES, **receiver.settings})


def find_holder(staff: Staff, client: "redis.Redis", workers: list[Employee]) -> Employee | None:
    """Return the worker that evaluates alerts."""
    turn = client.get(staff.app.keys.metrics_turn)
    assert not isinstance(turn, str)
    return next((worker for worker in workers if f":{worker.process.pid}" in (turn or b"").decode()), None)


def wait_for_holder(staff: Staff, client: "redis.Redis", workers: list[Employee]) -> Employee:
    """Return the worker that evaluates alerts, as soon as there is one."""
    wait_until(lambda: find_holder(staff, client, workers) is not None)
    holder = find_holder(staff, client, workers)
    assert holder is not None
    return holder


def send_to(staff: Staff, queue: str) -> None:
    """Send a job to a queue that no worker reads."""
    staff.app.tasks["quiet"].options(queue=queue).delay(1)


def has_arrived(receiver: Receiver, queue: str) -> bool:
    """Whether the receiver has got the notification for a queue."""
    return ("alert.fired", f"queue {queue}") in [notification.change for notification in receiver.received]


def assert_each_fired_once(staff: Staff, receiver: Receiver, queues: list[str]) -> None:
    """Each queue has one notification: what was sent twice has the same id."""
    ids = {(notification.change, notification.id) for notification in receiver.received}
    assert Counter(change for change, _ in ids) == {("alert.fired", f"queue {queue}"): 1 for queue in queues}
    history = [(transition.change, transition.subject) for transition in staff.app.alerts.history()]
    assert Counter(history) == {("fired", f"queue {queue}"): 1 for queue in queues}
    assert receiver.forged == 0


def test_each_alert_fires_once_while_the_holder_of_the_turn_is_killed(
    staff: Staff, redis_client: "redis.Redis"
) -> None:
    with Receiver() as receiver:
        workers = [start(staff, receiver) for _ in range(3)]
        queues = [f"lonely-{number}" for number in range(6)]
        for queue in queues:
            holder = wait_for_holder(staff, redis_client, workers)
            send_to(staff, queue)
            holder.signal(signal.SIGKILL)
            workers.remove(holder)
            workers.append(start(staff, receiver))
            wait_until(partial(has_arrived, receiver, queue))
        assert_each_fired_once(staff, receiver, queues)


def test_a_notification_that_a_killed_worker_could_not_send_is_sent_by_another(
    staff: Staff, redis_client: "redis.Redis"
) -> None:
    with Receiver() as receiver:
        receiver.status = 503
        workers = [start(staff, receiver) for _ in range(2)]
        holder = wait_for_holder(staff, redis_client, workers)
        send_to(staff, "lonely")
        wait_until(lambda: receiver.attempts > 0)
        holder = wait_for_holder(staff, redis_client, workers)
        holder.signal(signal.SIGKILL)
        receiver.status = 200
        wait_until(partial(has_arrived, receiver, "lonely"))
        assert_each_fired_once(staff, receiver, ["lonely"])
        # Lines are written by their own thread: one that was not written yet is logged again by the other.
        wait_until(lambda: any(worker.lines("alert:fired") for worker in workers))


def test_each_alert_fires_once_while_the_holder_of_the_turn_is_frozen(
    staff: Staff, redis_client: "redis.Redis"
) -> None:
    with Receiver() as receiver:
        workers = [start(staff, receiver) for _ in range(3)]
        queues = [f"lonely-{number}" for number in range(3)]
        for queue in queues:
            holder = wait_for_holder(staff, redis_client, workers)
            holder.signal(signal.SIGSTOP)
            send_to(staff, queue)
            wait_until(partial(has_arrived, receiver, queue))
            assert wait_for_holder(staff, redis_client, workers) is not holder
            holder.signal(signal.SIGCONT)
        send_to(staff, "last")
        wait_until(partial(has_arrived, receiver, "last"))
        assert_each_fired_once(staff, receiver, [*queues, "last"])
