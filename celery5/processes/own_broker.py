"""Run the broker that a Controller starts itself: it is up before anything else, and ends last."""

import os
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio

from celery5.app import App
from celery5.broker.servers.kept_server import KeptServer
from celery5.config.settings import find_source
from celery5.errors import BrokerUnavailable, Misconfigured
from celery5.logs.log import Log
from celery5.platform import MessageBroker
from celery5.processes.platform_factory import load_class
from celery5.protocol.cluster.own_broker import OwnBroker
from celery5.protocol.masking import mask_passwords
from celery5.services.controller.broker_supervisor import BrokerSupervisor

ClusterBroker = KeptServer | MessageBroker
"""A broker that a Controller runs: celery5's own server, or what a user's class runs."""


def resolve_paths(broker: OwnBroker, folder: Path) -> OwnBroker:
    """Return the broker with absolute paths. Relative ones are relative to the folder of the description."""
    whole = folder.absolute()

    def resolve(text: str) -> str:
        return os.path.normpath(whole / Path(text).expanduser())

    return msgspec.structs.replace(
        broker, folder=resolve(broker.folder), socket=resolve(broker.socket) if broker.socket else ""
    )


class StoppedBeforeReady(Exception):
    """This process was stopped before the broker was up."""


@contextmanager
def running_own_broker(
    app: App, broker: OwnBroker | None, is_stopping: Callable[[], bool]
) -> Generator[ClusterBroker | None, None, None]:
    """Run the broker of the cluster description during the block; yield None when the description has none.

    Raises Misconfigured when the application names another broker, or another Controller runs this one; ServerNotFound;
    BrokerUnavailable when it does not come up; StoppedBeforeReady when `is_stopping` while it starts.
    """
    if broker is None:
        yield None
        return
    server = make_cluster_broker(broker, app.name)
    try:
        _check(app, server.url)
        _begin(server, is_stopping)
        app.use_broker(server.url)
        where = (
            f"\"$(cat '{server.folder}/url')\""
            if isinstance(server, KeptServer)
            else mask_passwords(server.url)
        )
        sys.stderr.write(f"producers reach the broker with CELERY5_BROKER={where}\n")
        try:
            yield server
        finally:
            app.close()
    finally:
        server.stop()


def make_cluster_broker(broker: OwnBroker, app: str) -> ClusterBroker:
    """Return the broker server of a description: celery5's own, or an object of the user's class.

    Raises:
        Misconfigured: The class cannot be found or made, or is no MessageBroker.
        ServerNotFound: There is no server binary.
    """
    if not broker.is_custom:
        return KeptServer(broker)
    what = f"broker {broker.server!r}"
    try:
        server: Any = load_class(broker.server, what)(settings=broker, app=app)
    except TypeError as error:
        raise Misconfigured(f"{what}: it is called with settings and app, and raises {error}") from None
    if not isinstance(server, MessageBroker):
        raise Misconfigured(f"{what} is not a subclass of celery5.platform.MessageBroker")
    return server


def _begin(server: ClusterBroker, given_up: Callable[[], bool]) -> None:
    try:
        server.start(given_up)
    except BrokerUnavailable:
        if given_up():
            raise StoppedBeforeReady from None
        raise


@asynccontextmanager
async def supervised_server(
    server: ClusterBroker | None, hung_after: float, log: Log
) -> AsyncGenerator[None, None]:
    """Keep the server running during the block, also while that ends: what ends in it needs the broker."""
    if server is None:
        yield
        return
    scope = trio.CancelScope(shield=True)
    service = BrokerSupervisor(server=server, hung_after=hung_after, log=log)

    async def look(*, task_status: trio.TaskStatus[None]) -> None:
        with scope:
            await service.run(task_status=task_status)

    async with trio.open_nursery() as nursery:
        await nursery.start(look)
        try:
            yield
        finally:
            scope.cancel()


def _check(app: App, url: str) -> None:
    """Members get the URL by their environment, against which code wins. Producers should find the same."""
    source = find_source("broker", app.explicit_settings, os.environ, None)
    if source is not None and source.raw != url:
        raise Misconfigured(
            f"{source.where} names another broker than [broker] in the cluster description, which is "
            f"at {mask_passwords(url)}: "
            "leave one of them out, or say the same"
        )
