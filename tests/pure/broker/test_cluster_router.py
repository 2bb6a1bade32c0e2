"""The router of a Redis Cluster with scripted nodes: where a call goes after a refusal, and what its error says."""

from collections.abc import Sequence
from typing import Any

import pytest

from celery5.broker.call import Call, Script, parse_int, script_call
from celery5.broker.colour import run_blocking
from celery5.broker.drivers.cluster_blocking import BlockingCluster
from celery5.broker.endpoint import Endpoint
from celery5.broker.routing import cluster_router
from celery5.broker.routing.cluster_router import ClusterRouter
from celery5.broker.translate import SlotUnstable, translate_reply
from celery5.errors import BrokerError, BrokerUnavailable
from celery5.protocol.hash_slots import NodeAddress, get_key_slot

A, B = NodeAddress("10.0.0.1", 6379), NodeAddress("10.0.0.2", 6380)
SLOT = get_key_slot("a")
GET = Call(("GET", "a"), parse_int, repeatable=True)
Reply = int | BrokerError


class ScriptedCluster:
    """Two nodes. Calls are answered in turn, by whichever node; the map of each says that it has all slots."""

    def __init__(self, *replies: Reply, stale: bool = False) -> None:
        self.replies = list(replies)
        self.asked: list[NodeAddress] = []
        self.stale = stale
        endpoint = Endpoint.from_url("redis+cluster://10.0.0.1:6379")
        self.router: ClusterRouter = ClusterRouter(endpoint, self._get_node)

    async def _get_node(self, address: NodeAddress) -> "ScriptedNode":
        return ScriptedNode(self, address)

    def get(self) -> int:
        """Perform GET."""
        return run_blocking(self.router.perform(GET))


class ScriptedNode:
    """One scripted node."""

    def __init__(self, cluster: ScriptedCluster, address: NodeAddress) -> None:
        self._cluster, self._address = cluster, address

    async def perform(self, call: Call[Any], /) -> Any:
        (reply,) = await self.perform_each([call])
        if isinstance(reply, BrokerError):
            raise reply
        return reply

    async def perform_all(self, calls: Sequence[Call[Any]], /) -> list[Any]:
        return [await self.perform(call) for call in calls]

    async def perform_each(self, calls: Sequence[Call[Any]], /) -> list[Any]:
        replies: list[Any] = []
        for call in calls:
            if call.words[0] == "CLUSTER":
                node = A if self._cluster.stale else self._address
                replies.append([[0, 16383, [node.host.encode(), node.port]]])
            else:
                self._cluster.asked.append(self._address)
                replies.append(self._cluster.replies.pop(0))
        return replies


def make_moved(host: str, port: int) -> BrokerError:
    return translate_reply(f"MOVED {SLOT} {host}:{port}", where="redis://10.0.0.1")


def test_a_call_follows_a_slot_to_the_node_that_is_named() -> None:
    cluster = ScriptedCluster(make_moved(B.host, B.port), 7)
    assert cluster.get() == 7
    assert cluster.asked == [A, B]


def test_a_node_that_is_named_without_a_host_is_on_the_host_that_was_asked() -> None:
    cluster = ScriptedCluster(make_moved("", 6380), 7)
    assert cluster.get() == 7
    assert cluster.asked == [A, NodeAddress(A.host, 6380)]


def test_a_slot_that_has_moved_is_found_at_once_where_the_map_of_its_node_is_older() -> None:
    cluster = ScriptedCluster(make_moved(B.host, B.port), 7, 8, stale=True)
    assert (cluster.get(), cluster.get()) == (7, 8)
    assert cluster.asked == [A, B, B]


def test_a_call_that_may_have_run_says_so_when_a_later_attempt_was_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_router, "RETRY_FOR", 0.02)
    lost = BrokerUnavailable("the reply was lost", maybe_done=True)
    cluster = ScriptedCluster(lost, *(SlotUnstable("TRYAGAIN") for _ in range(100)))
    with pytest.raises(BrokerUnavailable, match="TRYAGAIN") as caught:
        cluster.get()
    assert caught.value.maybe_done


@pytest.mark.parametrize(("first", "maybe_done"), [(7, True), (BrokerError("no"), False)])
def test_the_error_of_several_calls_says_whether_one_of_them_has_run(first: Reply, maybe_done: bool) -> None:
    cluster = ScriptedCluster(first, BrokerError("no"))
    with pytest.raises(BrokerError, match="no") as caught:
        run_blocking(cluster.router.perform_all([GET, GET]))
    assert caught.value.maybe_done == maybe_done


def test_a_script_whose_slot_moves_is_not_sent_after_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_router, "PAUSE_START", 0.0)
    cluster = ScriptedCluster(translate_reply(f"ASK {SLOT} 10.0.0.2:6380", where="redis://10.0.0.1"), 7)
    call = script_call(Script.of("count", "return 7"), ("{a}",), (), parse_int)
    assert run_blocking(cluster.router.perform(call)) == 7
    assert cluster.asked == [A, A], "at the other node it would be refused, too"


@pytest.mark.parametrize(("first", "maybe_done"), [(7, True), (BrokerError("no"), False)])
def test_the_error_of_replicated_calls_says_whether_one_of_them_has_run(
    first: Reply, maybe_done: bool
) -> None:
    redis = BlockingCluster(Endpoint.from_url("redis+cluster://10.0.0.1:6379"))
    redis.router = ScriptedCluster(first, BrokerError("no"), 1).router
    with pytest.raises(BrokerError, match="no") as caught:
        redis.perform_replicated([GET, GET], [GET])
    assert caught.value.maybe_done == maybe_done
