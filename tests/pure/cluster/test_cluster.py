"""Cluster: a cluster description is read whole or refused whole, and says what members there are."""

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.cli.main import cli
from celery5.errors import Misconfigured
from celery5.protocol.cluster.description import (
    FLAG_TYPES,
    UNSUPPORTED_FLAGS,
    Cluster,
    Group,
    Host,
    ValueChecker,
    build_members,
    distribute_workers,
    parse_cluster,
)
from celery5.protocol.cluster.members import KINDS, Kind, Member
from celery5.protocol.cluster.own_broker import OwnBroker

DESCRIPTION = b"""
platform = "processes"
restart_limit = 3
hung_after = 20
[environment]
TZ = "UTC"
[routers.default]
[workers.mail]
count = 2
queues = ["mail", "bulk"]
concurrency = 7
reload = false
status_port = 9000
max_jobs = 500
max_memory = "500 MiB"
grace_period = 5
environment = { TZ = "Europe/Berlin", POOL = 3 }
hosts = ["web2"]
[hosts.web2]
ssh = "deploy@web2"
command = "~/venv/bin/celery5"
directory = "/srv/shop"
environment = { CELERY5_BROKER = "redis://db" }
environment_file = "~/.config/celery5/shop.env"
"""


def test_a_description_says_what_members_there_are() -> None:
    cluster = parse_cluster(DESCRIPTION)
    assert (cluster.platform, cluster.restart_limit, cluster.hung_after) == ("processes", 3, 20.0)
    assert cluster.hosts == {
        "web2": Host(
            name="web2",
            ssh="deploy@web2",
            command="~/venv/bin/celery5",
            directory="/srv/shop",
            environment={"CELERY5_BROKER": "redis://db"},
            environment_file="~/.config/celery5/shop.env",
        )
    }
    first, second, router = build_members(cluster, grace=9)
    assert first == Member(
        name="worker-mail-1@web2",
        kind="worker",
        group="mail",
        host="web2",
        arguments=(
            *("worker", "start", "--name", "worker-mail-1@web2"),
            *("--concurrency", "7", "--grace-period", "5.0", "--max-jobs", "500"),
            *("--max-memory", str(500 * 1024**2), "--queues", "mail,bulk", "--no-reload"),
            *("--status-port", "9000"),
        ),
        environment={"TZ": "Europe/Berlin", "POOL": "3", "CELERY5_WORKER_GROUP": "mail"},
        stop_after=55.0,
    )
    assert second.arguments[-1] == "9001", "each further member has the next port"
    assert router.arguments == ("router", "start", "--name", "router-default-1")
    assert (router.environment, router.stop_after) == ({"TZ": "UTC"}, 59.0)


def test_a_scale_says_how_many_there_are_instead() -> None:
    cluster = parse_cluster(DESCRIPTION)
    names = [member.name for member in build_members(cluster, {"worker-mail": 3, "router-default": 0})]
    assert names == [f"worker-mail-{n}@web2" for n in (1, 2, 3)]


def test_what_is_scaled_is_spread_over_hosts_and_groups() -> None:
    cluster = Cluster(
        groups=(
            Group(kind="worker", name="a", count=1, hosts=("h", "i")),
            Group(kind="worker", name="b", count=1),
            Group(kind="worker", name="off", count=0),
            Group(kind="router"),
        )
    )
    assert distribute_workers(cluster, 6) == {"worker-a": 4, "worker-b": 2, "worker-off": 0}
    assert distribute_workers(cluster, 2) == {"worker-a": 1, "worker-b": 1, "worker-off": 0}
    assert distribute_workers(cluster, 1) == {"worker-a": 1, "worker-b": 0, "worker-off": 0}
    assert distribute_workers(cluster, 0) == {"worker-a": 0, "worker-b": 0, "worker-off": 0}
    names = [
        member.name for member in build_members(cluster, {"worker-a": 3, "worker-b": 0, "router-default": 0})
    ]
    assert names == ["worker-a-1@h", "worker-a-2@h", "worker-a-1@i"]
    assert distribute_workers(Cluster(groups=(Group(kind="worker", count=0),)), 3) == {"worker-default": 3}
    assert distribute_workers(Cluster(groups=(Group(kind="router"),)), 3) == {}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 40))
def test_all_workers_that_are_wanted_are_spread(counts: list[int], workers: int) -> None:
    groups = tuple(Group(kind="worker", name=str(n), count=count) for n, count in enumerate(counts))
    assert sum(distribute_workers(Cluster(groups=groups), workers).values()) == workers


def test_description_overrides_the_environment_of_all_members() -> None:
    cluster = Cluster(groups=(Group(kind="worker"),), environment={"A": "its own"})
    (member,) = build_members(cluster, environment={"A": "around", "B": "around"})
    assert member.environment == {"A": "its own", "B": "around", "CELERY5_WORKER_GROUP": "default"}
    (member,) = build_members(cluster, environment={"CELERY5_WORKER_GROUP": "paris"})
    assert member.environment["CELERY5_WORKER_GROUP"] == "paris"


def test_members_have_names_of_their_own() -> None:
    cluster = parse_cluster(
        {
            "workers": {"a": {"count": 3, "hosts": ["h", "i"]}, "a-1": {"count": 2}},
            "hosts": {"h": {}, "i": {}},
        }
    )
    names = [member.name for member in build_members(cluster)]
    assert len(names) == len(set(names)) == 8


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ({"worker": {}}, "worker is not known; did you mean 'workers'?"),
        ({"workers": {"a": {"cuont": 2}}}, "workers.a.cuont is not known; did you mean 'count'?"),
        ({"workers": {"a": {"count": -1}}}, "workers.a.count: -1 is not a whole number from 0 to 10000"),
        ({"workers": {"a": {"count": True}}}, "workers.a.count: True is not a whole number"),
        ({"workers": {"a": {"count": 1.5}}}, "workers.a.count: 1.5 is not a whole number"),
        ({"workers": {"a b": {}}}, "workers.a b: use letters, digits"),
        ({"workers": {"a": {"processes": 2}}}, "workers.a.processes: each member is one process: say count = N"),
        ({"workers": {"a": {"burst": True}}}, "workers.a.burst: members stay until they are stopped"),
        ({"workers": {"a": {"queues": [1]}}}, "workers.a.queues: [1] is not a list of names"),
        ({"workers": {"a": {"reload": "no"}}}, "workers.a.reload: 'no' is not true or false"),
        ({"workers": {"a": {"hosts": ["b"]}}}, "workers.a.hosts: no host 'b'; write [hosts.b]"),
        ({"workers": {"a": {"max_memory": "much"}}}, "workers.a.max_memory: 'much' is not a size"),
        ({"workers": {"a": {"environment": {"A": []}}}}, "workers.a.environment.A: [] is not a text"),
        ({"workers": {"a": 3}}, "workers.a: 3 is not a table: write [workers.NAME]"),
        ({"workers": 3}, "workers: 3 is not a table"),
        ({"routers": {"a": {"queues": ["b"]}}}, "routers.a.queues is not known"),
        ({"hosts": {"b": {"ssh": "-oProxyCommand=x"}}}, "hosts.b.ssh: '-oProxyCommand=x' is no name of a host"),
        ({"hosts": {"b": {"comand": "x"}}}, "hosts.b.comand is not known; did you mean 'command'?"),
        ({"hosts": {"b": {"command": "a 'b"}}}, "hosts.b.command: \"a 'b\" is no command: No closing quotation"),
        ({"hosts": {"b": {"command": "a\nExecStop=b"}}}, "hosts.b.command: 'a\\nExecStop=b' is empty, or has"),
        ({"hosts": {"b": {"directory": "shop"}}}, "hosts.b.directory: 'shop' does not begin with / or ~/"),
        ({"hosts": {"b": {"environment_file": ""}}}, "hosts.b.environment_file: '' is empty"),
        ({"restart_limit": 0}, "restart_limit: 0 is not a whole number from 1 to"),
        ({"hung_after": "x"}, "hung_after: 'x' is not a duration: write 30s"),
        ({"hung_after": float("nan")}, "hung_after: nan is not a number"),
        ({"platform": 3}, "platform: 3 is not a text"),
        ({}, "no group of members: write [workers.default]"),
        (b"[", "not TOML"),
        (b"\xff", "not TOML"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_key(said: dict[str, object] | bytes, wrong: str) -> None:
    with pytest.raises(Misconfigured) as caught:
        parse_cluster(said)
    assert wrong in str(caught.value)


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(Misconfigured) as caught:
        parse_cluster({"restart_limit": 0, "workers": {"a": {"count": -1, "cpu_slots": "x"}}})
    assert str(caught.value).count(";") == 2


@pytest.mark.parametrize("kind", KINDS)
def test_every_flag_that_starts_such_a_process_can_be_said_of_a_group(kind: Kind) -> None:
    group = cli.get_command(click.Context(cli), kind)
    assert isinstance(group, click.Group)
    options = [param for param in group.commands["start"].params if isinstance(param, click.Option)]
    flags = {max(flag.opts, key=len).removeprefix("--").replace("-", "_") for flag in options}
    assert flags - set(UNSUPPORTED_FLAGS) == set(FLAG_TYPES[kind])
    for option in options:
        name = max(option.opts, key=len).removeprefix("--").replace("-", "_")
        if isinstance(option.type, click.Choice):
            assert FLAG_TYPES[kind][name] == tuple(option.type.choices)


class Strict(ValueChecker):
    """Finds fault with all."""

    def check_flag(self, kind: Kind, name: str, value: object) -> str:
        return f"of a {kind} is bad: {name} {value}"

    def check_variable(self, name: str, value: str) -> str:
        return f"is bad: {value}"


def test_check_of_values_reports_its_errors_with_the_others() -> None:
    said = {
        "environment": {"A": "1"},
        "hosts": {"there": {"environment": {"B": "2"}}},
        "workers": {"default": {"concurrency": 7, "cuont": 1, "environment": {"C": 3}}},
    }
    with pytest.raises(Misconfigured) as caught:
        parse_cluster(said, Strict())
    assert sorted(str(caught.value).split("; ")) == [
        *("did you mean 'count'?", "environment.A is bad: 1", "hosts.there.environment.B is bad: 2"),
        "workers.default.concurrency of a worker is bad: concurrency 7",
        *("workers.default.cuont is not known", "workers.default.environment.C is bad: 3"),
    ]


@pytest.mark.parametrize("level", ["lound", "", 7])
def test_a_log_level_is_one_of_those_that_there_are(level: object) -> None:
    with pytest.raises(Misconfigured, match="is none of debug, info, warning, error"):
        parse_cluster({"workers": {"default": {"log_level": level}}})


def test_a_broker_of_its_own_is_for_one_host_and_all_members() -> None:
    told = parse_cluster(b'[broker]\nport = 7000\nfsync = "always"\n[workers.a]')
    assert told.broker == OwnBroker(port=7000, fsync="always")
    assert parse_cluster(b"[workers.a]").broker is None
    assert parse_cluster(b"[broker]\n[workers.a]").broker == OwnBroker()


def test_a_broker_that_the_users_class_runs_may_serve_several_hosts() -> None:
    cluster = parse_cluster(
        b"[broker]\nserver = 'shop.brokers:Garage'\n[broker.options]\nsize = 3\n[hosts.b]\n[workers.a]"
    )
    assert cluster.broker == OwnBroker(server="shop.brokers:Garage", options={"size": 3})
    assert cluster.broker.is_custom
    assert not OwnBroker(server="/opt/redis:7/bin/redis-server").is_custom


@pytest.mark.parametrize(
    ("section", "advice"),
    [
        (
            "dashboards",
            "dashboards: the dashboard is no member: run `celery5 dashboard start` beside the Controller",
        ),
        ("web", "web: the dashboard is no member: "),
        ("beat", "beat: write [schedulers.NAME]"),
        ("scheduler", "scheduler is not known; did you mean 'schedulers'?"),
    ],
)
def test_unknown_kind_of_member_is_refused_with_what_to_do_instead(section: str, advice: str) -> None:
    with pytest.raises(Misconfigured) as caught:
        parse_cluster(f"[{section}.default]\n[workers.default]".encode())
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("broker = 1\n[workers.a]", "broker: 1 is not a table: write [broker]"),
        (
            "[broker]\n[hosts.b]\n[workers.a]",
            "broker: who runs the broker itself has all members on the same host",
        ),
        ("[broker]\n[workers.a]\nbroker = 'redis://b'", "workers.a.broker: [broker] is that of all members"),
        (
            "[broker]\n[environment]\nCELERY5_BROKER = 'b'\n[workers.a]",
            "environment.CELERY5_BROKER: [broker] is",
        ),
        ("[broker]\n[workers.a.environment]\nCELERY5_BROKER = 'b'", "workers.a.environment.CELERY5_BROKER: "),
        ("[broker]\nprot = 1\n[workers.a]", "broker.prot is not known; did you mean 'port'?"),
        (
            "[broker]\nmemory = 1\n[workers.a]",
            "broker.memory is not known; known: server, folder, socket, port, fsync, options",
        ),
        ("[broker]\nport = 70000\n[workers.a]", "broker.port: 70000 is not a whole number from 0 to 65535"),
        ("[broker]\nport = true\n[workers.a]", "broker.port: True is not"),
        ("[broker]\nfsync = 'often'\n[workers.a]", "broker.fsync: 'often' is none of always, everysec, no"),
        ("[broker]\nfolder = ''\n[workers.a]", "broker.folder: '' is not a text that a path can be"),
        ('[broker]\nsocket = "a\\n"\n[workers.a]', "broker.socket: 'a\\n' is not a text"),
        ("[broker]\noptions = 1\n[workers.a]", "broker.options: 1 is not a table"),
        (
            "[broker]\n[broker.options]\nsize = 1\n[workers.a]",
            "broker.options: they are for a class of your own: server = 'module:Class'",
        ),
    ],
)
def test_what_is_wrong_with_a_broker_of_its_own_is_told(said: str, wrong: str) -> None:
    with pytest.raises(Misconfigured) as caught:
        parse_cluster(said.encode())
    assert wrong in str(caught.value)
