"""Messages on a Redis Cluster stay on the node of their channel's slot, and subscribers follow a slot that moves."""

from collections.abc import Callable

import pytest
import trio

from celery5 import App, every
from celery5.broker.drivers.cluster_on_trio import ClusterRedis
from celery5.broker.drivers.cluster_push import ClusterPush
from celery5.broker.timing import Timing
from celery5.doctor.server_nodes import read_primary_views
from celery5.errors import BrokerDenied, BrokerUnavailable, TaskFailed
from celery5.processes.scheduler import SCHEDULER
from tests.cluster_servers import TestCluster, running_cluster
from tests.redis.worker.workers import start, until

Publish = Callable[[str, str], int]


@pytest.fixture
def publish(redis_cluster: TestCluster) -> Publish:
    """Publishes on a channel as a script does, and returns how many have heard it at that node."""

    def send(channel: str, message: str) -> int:
        node = redis_cluster.find_owner(channel)
        command = "SPUBLISH" if node.has_sharded_channels else "PUBLISH"
        return int(node.client.execute_command(command, channel, message))

    return send


def count_bus_messages(cluster: TestCluster) -> int:
    """Return how many messages of PUBLISH the nodes have sent to each other."""
    total = 0
    for node in cluster.nodes:
        info = node.client.execute_command("CLUSTER", "INFO")
        fields = (
            info if hasattr(info, "keys") else dict(line.split(":") for line in info.splitlines() if line)
        )
        total += int(fields.get("cluster_stats_messages_publish_sent", 0))
    return total


class Listener:
    """Listens to channels, and keeps their messages."""

    def __init__(self, app: App, timing: Timing = Timing(reply=5.0)) -> None:  # noqa: B008  frozen
        self.heard: list[tuple[bytes, bytes]] = []
        self.rechecks = 0
        endpoint = app.connections.endpoint
        self.redis = ClusterRedis(endpoint=endpoint)
        self.push = ClusterPush(
            endpoint=endpoint,
            control=self.redis,
            on_message=lambda channel, payload: self.heard.append((channel, payload)),
            on_connected=self._recheck,
            timing=timing,
        )

    def _recheck(self) -> None:
        self.rechecks += 1

    async def run(self, nursery: trio.Nursery) -> None:
        await nursery.start(self.redis.run)
        await nursery.start(self.push.run)


def list_wake_channels(app: App, count: int) -> list[str]:
    return [app.queue(f"queue-{number}").wake for number in range(count)]


async def test_jobs_results_and_wake_ups_send_nothing_to_the_other_nodes(
    redis_cluster: TestCluster, app: App
) -> None:
    if not redis_cluster.primaries[0].has_sharded_channels:
        pytest.skip("Redis has sharded channels from 7.0")

    @app.task(queue="mails", limit=1)
    async def double(number: int) -> int:
        return 2 * number

    @app.task(queue="images", max_retries=0)
    async def fail() -> None:
        raise ValueError

    before = count_bus_messages(redis_cluster)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            await start(nursery, app)
            results = [await double.options(countdown=number % 2 / 20).adelay(number) for number in range(10)]
            assert [await result.aget() for result in results] == [2 * number for number in range(10)]
            with pytest.raises(TaskFailed):
                await (await fail.adelay()).aget()
            run = await (double.s(20) | double.s()).astart()
            assert await run.aget() == 80
            assert await trio.to_thread.run_sync(lambda: double.delay(4).get(timeout=20)) == 8
            nursery.cancel_scope.cancel()
    assert count_bus_messages(redis_cluster) == before


async def test_a_message_is_heard_once_at_the_node_of_its_slot(app: App, publish: Publish) -> None:
    listener, channels = Listener(app), list_wake_channels(app, 20)
    async with trio.open_nursery() as nursery:
        await listener.run(nursery)
        await listener.push.subscribe(*channels)
        with trio.fail_after(20):
            for channel in channels:
                assert await trio.to_thread.run_sync(publish, channel, "1") == 1
            await until(lambda: len(listener.heard) == 20)
        assert sorted(listener.heard) == sorted((channel.encode(), b"1") for channel in channels)
        nursery.cancel_scope.cancel()


async def test_an_unsubscribed_channel_is_heard_no_more(app: App, publish: Publish) -> None:
    listener, channels = Listener(app), list_wake_channels(app, 6)
    async with trio.open_nursery() as nursery:
        await listener.run(nursery)
        await listener.push.subscribe(*channels)
        await listener.push.unsubscribe(*channels[:3])
        assert listener.push.channels == {channel.encode() for channel in channels[3:]}
        heard_by = [await trio.to_thread.run_sync(publish, channel, "") for channel in channels]
        assert heard_by == [0, 0, 0, 1, 1, 1]
        nursery.cancel_scope.cancel()


async def test_a_subscription_follows_a_slot_that_moves_and_listeners_look_again(
    redis_cluster: TestCluster, app: App, publish: Publish
) -> None:
    listener, channel = Listener(app), app.queue("mails").wake
    source = redis_cluster.find_owner(channel)
    target = next(node for node in redis_cluster.primaries if node is not source)
    async with trio.open_nursery() as nursery:
        await listener.run(nursery)
        await listener.push.subscribe(channel, app.queue("images").wake)
        with trio.fail_after(20):
            for count, node in enumerate((target, source), 1):
                rechecks = listener.rechecks
                await trio.to_thread.run_sync(redis_cluster.migrate, channel, node)
                if node.has_sharded_channels:
                    await until(lambda rechecks=rechecks: listener.rechecks > rechecks)  # type: ignore[misc]
                await trio.to_thread.run_sync(publish, channel, str(count))
                await until(lambda count=count: len(listener.heard) == count)  # type: ignore[misc]
        assert [message for _, message in listener.heard] == [b"1", b"2"]
        nursery.cancel_scope.cancel()


async def test_a_subscription_that_no_node_confirms_ends_as_an_outage(app: App) -> None:
    listener = Listener(app, Timing(reply=0.1))
    with pytest.raises(BrokerUnavailable, match=r"no subscription was confirmed within 0\.1 s"):
        await listener.push.subscribe(app.queue("mails").wake)


async def test_a_refused_subscription_is_told_to_its_caller_and_others_stay(
    redis_cluster: TestCluster, app: App, publish: Publish
) -> None:
    for node in redis_cluster.primaries:
        node.client.execute_command(
            *("ACL", "SETUSER", f"{app.name}-one", "on", ">secret", "~*", "+@all", "resetchannels"),
            f"&celery5:{{{app.name}:*}}:wake",
        )
    url = redis_cluster.url.replace("//", f"//{app.name}-one:secret@")
    limited = App(app.name, broker=url)
    listener = Listener(limited)
    async with trio.open_nursery() as nursery:
        await listener.run(nursery)
        await listener.push.subscribe(app.queue("mails").wake)
        with pytest.raises(BrokerDenied):
            await listener.push.subscribe(app.queue("mails").revoke)
        assert await trio.to_thread.run_sync(publish, app.queue("mails").wake, "") == 1
        nursery.cancel_scope.cancel()
    limited.close()
    for node in redis_cluster.primaries:
        node.client.execute_command("ACL", "DELUSER", f"{app.name}-one")


async def test_channel_whose_permission_is_taken_away_is_heard_again_when_given_back(
    redis_cluster: TestCluster, app: App, publish: Publish
) -> None:
    user, channel = f"{app.name}-one", app.queue("mails").wake
    node = redis_cluster.find_owner(channel).client

    def permit(*channels: str) -> None:
        words = ("on", ">secret", "~*", "+@all", "resetchannels", *channels)
        for primary in redis_cluster.primaries:
            primary.client.execute_command("ACL", "SETUSER", user, *words)

    permit(f"&{channel}")
    limited = App(app.name, broker=redis_cluster.url.replace("//", f"//{user}:secret@"))
    listener = Listener(limited)
    async with trio.open_nursery() as nursery:
        await listener.run(nursery)
        await listener.push.subscribe(channel)
        permit()
        await until(lambda: any(entry["username"] == user for entry in node.acl_log()))
        rechecks = listener.rechecks
        permit(f"&{channel}")
        await until(lambda: listener.rechecks > rechecks)
        assert await trio.to_thread.run_sync(publish, channel, "x") == 1
        await until(lambda: listener.heard == [(channel.encode(), b"x")])
        nursery.cancel_scope.cancel()
    limited.close()
    for primary in redis_cluster.primaries:
        primary.client.execute_command("ACL", "DELUSER", user)


async def test_a_changed_schedule_reaches_the_scheduler_from_any_slot(app: App) -> None:
    fired: list[int] = []

    @app.task(queue="images")
    async def tick() -> None:
        fired.append(1)

    async with trio.open_nursery() as nursery:
        await start(nursery, app)
        await start(nursery, app, page=SCHEDULER)
        with trio.fail_after(3):  # not only when it looks again, after five seconds
            await app.schedule.aadd(tick.s(), every(0.1), name="tick")
            await until(lambda: len(fired) > 0)
        nursery.cancel_scope.cancel()


async def test_channels_of_a_primary_that_dies_are_heard_at_its_replica(
    server_binary: str | None, app_name: str
) -> None:
    with running_cluster(server_binary, node_timeout_ms=500) as cluster:
        app = App(app_name, broker=cluster.url)
        listener, channel = Listener(app), app.queue("mails").wake
        primary = cluster.find_owner(channel)
        replica = await trio.to_thread.run_sync(cluster.add_replica, primary)
        with trio.fail_after(40):
            async with trio.open_nursery() as nursery:
                await listener.run(nursery)
                await listener.push.subscribe(channel)
                assert listener.push.connected
                views = await trio.to_thread.run_sync(read_primary_views, app.connections.endpoint)
                assert [view.online_replicas for view in views if view.replicas] == [
                    [f"127.0.0.1:{replica.port}"]
                ]
                await trio.to_thread.run_sync(primary.kill)
                await until(lambda: not listener.push.connected)
                await until(lambda: listener.push.connected and listener.rechecks > 0)
                command = "SPUBLISH" if replica.has_sharded_channels else "PUBLISH"
                assert replica.client.execute_command(command, channel, "1") == 1
                await until(lambda: listener.heard == [(channel.encode(), b"1")])
                nursery.cancel_scope.cancel()
        app.close()
