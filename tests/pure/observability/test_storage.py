"""What a server says of itself, as the page of storage shows it."""

from celery5.protocol.byte_counts import format_bytes
from celery5.protocol.observability.storage import describe_storage, estimate_bytes

INFO = {
    "valkey_version": "8.1.1",
    "redis_version": "7.2.4",
    "used_memory": "1350",
    "mem_not_counted_for_evict": "400",
    "used_memory_peak": "990",
    "maxmemory": "1000",
    "total_system_memory": "8000",
    "mem_fragmentation_ratio": "1.25",
    "evicted_keys": "3",
    "connected_clients": "12",
    "uptime_in_seconds": "86400",
    "db0": "keys=70,expires=40,avg_ttl=12",
    "db2": "keys=7,expires=4,avg_ttl=12",
}


def test_a_server_is_described_by_its_info_and_its_parameters() -> None:
    found = describe_storage(
        "default", INFO, {"maxmemory-policy": "allkeys-lru", "appendonly": "yes"}, database=2
    )
    assert found.version == "valkey 8.1.1"
    assert (found.used, found.peak, found.limit, found.machine) == (950, 990, 1000, 8000)
    assert (found.keys, found.expiring, found.evicted, found.clients) == (7, 4, 3, 12)
    assert (found.fragmentation, found.uptime, found.used_share) == (1.25, 86400, 0.95)
    assert found.memory is not None
    assert found.memory.state == "fail"
    assert "allkeys-lru: jobs are thrown away" in found.memory.summary
    assert found.persistence is not None
    assert found.persistence.state == "ok"


def test_a_server_that_says_nothing_of_itself_is_shown_all_the_same() -> None:
    found = describe_storage("default", {}, None, database=0)
    assert found.version == "redis of an unknown version"
    assert (found.used, found.limit, found.fragmentation, found.used_share) == (0, None, None, None)
    assert found.memory is not None
    assert found.memory.state == "warn"


def test_bytes_of_many_partitions_are_estimated_from_some_of_them() -> None:
    assert estimate_bytes(1000, 100, 400) == 4000
    assert estimate_bytes(1000, 100, 100) == 1000
    assert estimate_bytes(0, 0, 0) == 0
    assert estimate_bytes(80, 0, 10) == 80


def test_bytes_are_shown_in_the_unit_that_fits() -> None:
    shown = {None: "-", 0: "0 B", 999: "999 B", 1536: "1.5 KiB", 3 * 2**20: "3 MiB", 2**40: "1024 GiB"}
    assert {count: format_bytes(count) for count in shown} == shown
