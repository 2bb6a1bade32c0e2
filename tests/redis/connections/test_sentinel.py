"""A broker that sentinels name: its logins, a failover in each colour, what is said of it, and the doctor."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from celery5 import App
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.doctor.examination import get_checks, run_checks
from celery5.doctor.server_nodes import read_primary_views
from celery5.errors import BrokerDenied, BrokerError, BrokerUnavailable
from tests.redis.connections.colours import COLOURS, Here, live, raw
from tests.sentinel_servers import SERVICE, WatchedServers, watched_servers

SET = raw("SET", "colour", "1", "PX", 60_000, repeatable=True)


@pytest.fixture(scope="module")
def servers(server_binary: str | None) -> Iterator[WatchedServers]:
    """A primary with a replica, and three sentinels; servers and sentinels have passwords of their own."""
    with watched_servers(server_binary, password="hush", sentinel_password="still") as servers:
        yield servers


def refused(url: str) -> BrokerError:
    """The error of a blocking driver with that URL."""
    driver = BlockingRedis(Endpoint.from_url(url), timing=Timing(connect=2.0))
    with pytest.raises(BrokerError) as caught:
        driver.perform(SET)
    driver.close()
    assert "hush" not in str(caught.value)
    assert "still" not in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


def test_each_colour_follows_a_failover_to_the_new_primary(servers: WatchedServers) -> None:
    async def story(here: Here) -> Any:
        return await here.redis.perform(SET)

    servers.fail_over()
    for colour in COLOURS:
        assert live(colour, servers.url, story) == b"OK"
        assert servers.primary.client.getdel("colour") == "1"
    servers.wait_until_whole()


def test_a_connection_that_is_open_at_a_failover_is_replaced(servers: WatchedServers) -> None:
    async def story(here: Here) -> Any:
        await here.redis.perform(SET)
        servers.fail_over()
        servers.primary.client.delete("colour")
        for _ in range(200):
            # The old primary takes writes until it is demoted, and they are lost then.
            with suppress(BrokerUnavailable):
                await here.redis.perform(SET)
            if servers.primary.client.get("colour"):
                return True
            await here.sleep(0.05)
        return False

    assert live("trio", servers.url, story) is True
    servers.wait_until_whole()


def test_what_is_wrong_is_one_line_without_a_password(servers: WatchedServers) -> None:
    wrong = refused(servers.url.replace(SERVICE, "shop-primry"))
    assert f"watch no service 'shop-primry'; did you mean {SERVICE!r}?" in str(wrong)
    denied = refused(servers.url.replace("?sentinel_password=still", ""))
    assert isinstance(denied, BrokerDenied)
    assert "sentinel_password in the URL" in str(denied)
    assert isinstance(refused(servers.url.replace(":hush@", "")), BrokerDenied)
    one = f"redis+sentinel://:hush@127.0.0.1:{servers.primary.port}/{SERVICE}?sentinel_password=hush"
    assert "its sentinel does not answer" in str(refused(one))
    assert "is no Sentinel" in str(refused(one))


def test_the_doctor_names_primary_and_replicas_and_what_is_missing(
    servers: WatchedServers, app_name: str
) -> None:
    def find() -> tuple[str, str]:
        app = App(app_name, broker=servers.url, replicas=1)
        checks = [check for check in get_checks(app) if check.name in ("server", "replication")]
        finding = list(run_checks(checks))[-1]
        app.close()
        return finding.state, finding.summary

    servers.wait_until_whole()
    primary, (replica,) = servers.primary, servers.replicas
    summary = f"primary 127.0.0.1:{primary.port}, 1 replica: 127.0.0.1:{replica.port}"
    assert find() == ("warn", f"{summary}; min-replicas-to-write 0")
    primary.client.config_set("min-replicas-to-write", 1)
    assert find() == ("ok", summary)
    (view,) = read_primary_views(Endpoint.from_url(servers.url))
    assert (view.address, view.online_replicas) == (
        f"127.0.0.1:{primary.port}",
        [f"127.0.0.1:{replica.port}"],
    )
    primary.client.config_set("min-replicas-to-write", 0)
    servers.sentinels[2].kill()
    state, text = find()
    assert (state, f"sentinel 127.0.0.1:{servers.sentinels[2].port} cannot be reached" in text) == (
        "warn",
        True,
    )
    replica.kill()
    state, text = find()
    assert (state, "0 replicas; the setting replicas demands 1" in text) == ("fail", True)
    servers.revive()
