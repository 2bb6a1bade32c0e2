"""Systemd Place: when a Controller has systemd start its members, without being told to."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery5.errors import Misconfigured, PlatformError
from celery5.processes.platform_factory import make_platform, resolve_platform_name
from celery5.protocol.cluster.description import Cluster
from celery5.services.controller.sub_processes import SubProcesses
from celery5.services.controller.systemd_bus import find_bus, get_runtime_folder, is_service
from celery5.services.controller.systemd_units import SystemdUnits
from tests.trio.cluster.scripted_systemd import dbus_daemon

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux only")


@pytest.fixture
def service() -> Iterator[dict[str, str]]:
    """The environment of a service of the user's systemd, with a bus that answers."""
    with dbus_daemon() as bus:
        yield {
            "INVOCATION_ID": "0123",
            "NOTIFY_SOCKET": "/run/user/1000/systemd/notify",
            "SYSTEMD_EXEC_PID": str(os.getpid()),
            "MANAGERPID": "77",
            "DBUS_SESSION_BUS_ADDRESS": f"unix:path={bus}",
        }


def test_a_service_of_systemd_has_its_members_started_by_systemd(service: dict[str, str]) -> None:
    assert resolve_platform_name("auto", service) == "systemd"
    assert isinstance(make_platform(Cluster(platform="systemd"), "shop", service), SystemdUnits)


def test_the_description_may_say_otherwise(service: dict[str, str]) -> None:
    assert resolve_platform_name("processes", service) == "processes"
    assert isinstance(make_platform(Cluster(platform="processes"), "shop", service), SubProcesses)


@pytest.mark.parametrize("lacks", ["INVOCATION_ID", "NOTIFY_SOCKET"])
def test_what_systemd_has_not_started_does_without_it(service: dict[str, str], lacks: str) -> None:
    del service[lacks]
    assert resolve_platform_name("auto", service) == "processes"


def test_a_child_of_a_service_has_inherited_what_is_not_its_own(service: dict[str, str]) -> None:
    assert is_service(service, os.getpid())
    assert resolve_platform_name("auto", {**service, "SYSTEMD_EXEC_PID": "1"}) == "processes"


def test_without_a_bus_that_answers_members_are_sub_processes(service: dict[str, str]) -> None:
    assert (
        resolve_platform_name("auto", {**service, "DBUS_SESSION_BUS_ADDRESS": "unix:path=/none"})
        == "processes"
    )
    assert (
        resolve_platform_name("auto", {**service, "DBUS_SESSION_BUS_ADDRESS": "tcp:host=localhost,port=1"})
        == "processes"
    )


def test_a_service_of_the_systems_that_runs_as_a_user_may_not_ask_it_for_more(
    service: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = service["DBUS_SESSION_BUS_ADDRESS"]
    system = {name: variable for name, variable in service.items() if name != "MANAGERPID"} | {
        "DBUS_SYSTEM_BUS_ADDRESS": bus
    }
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert resolve_platform_name("auto", system) == "systemd"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert resolve_platform_name("auto", system) == "processes"


def test_the_systems_bus_is_roots_and_the_users_bus_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert find_bus({}) == "/run/dbus/system_bus_socket"
    assert get_runtime_folder({}) == Path("/run/celery5")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert find_bus({}) == "/run/user/1000/bus"
    assert find_bus({"XDG_RUNTIME_DIR": "/r"}) == "/r/bus"
    assert find_bus({"DBUS_SESSION_BUS_ADDRESS": "unix:abstract=/b,guid=1"}) == "\0/b"
    assert get_runtime_folder({"XDG_RUNTIME_DIR": "/r"}) == Path("/r/celery5")
    assert get_runtime_folder({"RUNTIME_DIRECTORY": "/r/one:/r/two"}) == Path("/r/one")


def test_an_address_that_is_no_unix_socket_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"DBUS_SESSION_BUS_ADDRESS": "tcp:host=h,port=1", "MANAGERPID": "1"}
    with pytest.raises(PlatformError, match="only unix sockets"):
        find_bus(environ)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Misconfigured, match="platform 'systemd': D-Bus at"):
        make_platform(Cluster(platform="systemd"), "shop", environ)
