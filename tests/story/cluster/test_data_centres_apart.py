"""Two data centres, each with a broker and a control plane of its own, that cannot reach each other: both are restarted
meanwhile. Each does the work of its own broker, with its Router, limits, schedules and streams. What is sent to the
other one waits in the sender. Afterwards one Controller leads, and nothing is lost or has run twice.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from celery5 import App, Event
from celery5.broker.servers.embedded import find_binary
from celery5.cli.terminal.loading import load_app
from celery5.errors import BrokerUnavailable
from tests.network import Network
from tests.night import with_clusters
from tests.sentinel_servers import Server, find_free_ports, wait_until
from tests.story.cluster.controlling import LIMIT, Controlling, until
from tests.story.conftest import fresh_modules

pytestmark = [
    pytest.mark.timeout(600),
    with_clusters("two minutes"),
]

SHOP = """
import os
import time

import trio

from celery5 import App, current_job, every
from celery5.streams import StreamEvents


def note(*words):
    with open(os.environ["NOTES"], "a") as file:
        file.write(" ".join(map(str, words)) + "\\n")


def make(frankfurt, dublin):
    app = App(
        os.environ["SHOP"],
        broker=frankfurt,
        brokers={"dublin": dublin},
        routes={"dublin-*": "dublin"},
        backlog=1000,
        concurrency=4,
        lease=3,
        grace_period=5,
    )

    async def work(kind, number):
        note("began", kind, number, time.monotonic())
        await trio.sleep(0.03)
        note("ended", kind, number, time.monotonic())
        return number

    @app.task(name="order", queue="orders", limit=1)
    async def order(number: int) -> int:
        return await work("order", number)

    @app.task(name="mail", queue="dublin-mails", limit=1)
    async def mail(number: int) -> int:
        return await work("mail", number)

    @app.task(name="order-tick", queue="orders", schedule=every(0.5))
    async def order_tick() -> None:
        note("fired", "order", current_job().id)

    @app.task(name="mail-tick", queue="dublin-mails", schedule=every(0.5))
    async def mail_tick() -> None:
        note("fired", "mail", current_job().id)

    @app.event(name="Placed")
    class Placed:
        number: int

    @Placed.subscribe
    @app.task(name="thank", queue="orders")
    async def thank(number: int) -> None:
        note("thanked", "order", number)

    payments = app.stream("payments", dict, by=lambda payment: payment["customer"], partitions=2)

    @app.processor(payments, name="bill")
    async def bill(events: StreamEvents[dict]) -> None:
        async for payment in events.records():
            note("billed", "order", payment["number"])

    return app


app = make(os.environ["FRANKFURT"], os.environ["DUBLIN"])
"""
CLUSTER = """
[workers.default]
count = 1
queues = ["orders", "dublin-mails"]

[routers.default]
count = 1

[schedulers.default]
count = 1
"""

__all__ = ["fresh_modules"]


class TwoSides:
    """Two brokers, a network between them, and the control plane and the application of each side."""

    def __init__(
        self, name: str, folder: Path, binary: Path, network: Network, patch: pytest.MonkeyPatch
    ) -> None:
        self._folder, self._notes = folder, folder / "notes"
        self._notes.touch()
        self.network = network
        self.servers: list[Server] = []
        for number, port in enumerate(find_free_ports(2)):
            lines = ["bind 127.0.0.1", f"port {port}", f"dir {folder / str(number)}", 'save ""']
            self.servers.append(Server(binary, folder / str(number), port, lines, {}))
            self.servers[-1].start()
            wait_until(self.servers[-1].answers, "the server answers")
        near = [f"redis://127.0.0.1:{server.port}/0" for server in self.servers]
        self._far_hosts = [network.add(server.port) for server in self.servers]
        far = [
            f"redis://{host}:{server.port}/0"
            for host, server in zip(self._far_hosts, self.servers, strict=True)
        ]
        common = {"SHOP": name, "NOTES": str(self._notes)}
        self.environments = {
            "order": {**common, "FRANKFURT": near[0], "DUBLIN": far[1]},
            "mail": {**common, "FRANKFURT": far[0], "DUBLIN": near[1]},
        }
        (folder / "shop.py").write_text(SHOP)
        patch.chdir(folder)
        for word, value in self.environments["order"].items():
            patch.setenv(word, value)
        load_app("shop")
        self.apps: dict[str, App] = {
            "order": sys.modules["shop"].app,
            "mail": sys.modules["shop"].make(far[0], near[1]),
        }

    def begin(self, side: str, stack: ExitStack) -> Controlling:
        """Start the control plane of a side."""
        folder = self._folder / f"{side}-{len(list(self._folder.iterdir()))}"
        folder.mkdir()
        (folder / "shop.py").write_text(SHOP)
        controller = Controlling(folder, CLUSTER, "--name", side, env=self.environments[side])
        return stack.enter_context(controller)

    def cut(self) -> None:
        """Let neither side reach the broker of the other one."""
        self.network.cut_off(*self._far_hosts)

    def list_notes(self, what: str) -> list[list[str]]:
        """Return what jobs have noted of one kind."""
        lines = [line.split() for line in self._notes.read_text().splitlines()]
        return [words[1:] for words in lines if words[0] == what]

    def stop(self) -> None:
        """End the servers."""
        for app in self.apps.values():
            app.close()
        for server in self.servers:
            server.kill()
            server.client.close()


@pytest.fixture
def centres(
    tmp_path: Path,
    app_name: str,
    server_binary: str | None,
    fresh_modules: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[TwoSides]:
    """Frankfurt, which has `default` and orders, and Dublin, which has mails."""
    with Network().running() as network:
        both = TwoSides(app_name, tmp_path, find_binary(server_binary), network, monkeypatch)
        try:
            yield both
        finally:
            both.stop()


def test_data_centres_that_are_restarted_apart_do_their_own_work_and_meet_again(
    centres: TwoSides,
) -> None:
    def count_ticks(kind: str) -> int:
        return sum(noted[0] == kind for noted in centres.list_notes("fired"))

    def fires(kind: str) -> None:
        before = count_ticks(kind)
        until(lambda: count_ticks(kind) >= before + 2)

    with ExitStack() as stack:
        centres.begin("order", stack).up()
        fires("order")
        fires("mail")
    centres.cut()
    with ExitStack() as stack:
        planes = {side: centres.begin(side, stack) for side in ("order", "mail")}
        waiting = {}
        for side, other in (("order", "mail"), ("mail", "order")):
            app = centres.apps[side]
            results = [app.tasks[side].delay(number) for number in range(10)]
            assert [result.get(timeout=LIMIT) for result in results] == list(range(10))
            fires(side)
            waiting[other] = app.tasks[other].delay(100)
            assert app.backlog.size == 1, "published later: available"
            with pytest.raises(BrokerUnavailable):
                waiting[other].status()  # no old answer: consistent
        frankfurt, dublin = centres.apps["order"], centres.apps["mail"]
        frankfurt.streams["payments"].send(*({"customer": f"c{n % 3}", "number": n} for n in range(10)))
        make_placed: Callable[..., Event] = frankfurt.events["Placed"]
        frankfurt.events.send([make_placed(number=1)])
        until(lambda: len(centres.list_notes("billed")) == 10 and centres.list_notes("thanked"))
        with pytest.raises(BrokerUnavailable):  # streams and events are where `default` is
            dublin.streams["payments"].send({"customer": "c1", "number": 10})
        assert planes["order"].logged("leadership:acquired")
        assert not planes["mail"].logged("leadership:acquired")

        centres.network.join_all()
        assert [result.get(timeout=LIMIT) for result in waiting.values()] == [100, 100]
        until(lambda: not planes["mail"].pids())  # Frankfurt leads: this one stands by
        fires("order")
        fires("mail")
    check_notes(centres)


def check_notes(centres: TwoSides) -> None:
    """Check that nothing has run twice, and no more at once than the limit says."""
    fired = [job for _, job in centres.list_notes("fired")]
    assert len(fired) == len(set(fired))
    assert sorted(int(number) for _, number in centres.list_notes("billed")) == list(range(10))
    assert len(centres.list_notes("thanked")) == 1
    for kind in ("order", "mail"):
        began, ended = (
            {int(number): float(at) for noted, number, at in centres.list_notes(what) if noted == kind}
            for what in ("began", "ended")
        )
        assert len([None for noted, *_ in centres.list_notes("began") if noted == kind]) == 11
        spans = sorted((began[number], ended[number]) for number in began)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
