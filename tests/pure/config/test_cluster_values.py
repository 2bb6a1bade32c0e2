"""Described: what members would find wrong with their values is told by whoever reads the description."""

from collections.abc import Mapping

import pytest

from celery5.errors import Misconfigured
from celery5.processes.controller import DescriptionChecker
from celery5.protocol.cluster.description import parse_cluster


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ({"concurrency": 0}, "workers.default.concurrency is 0: Expected `int` >= 1"),
        ({"broker": "ftp://there"}, "workers.default.broker is 'ftp://there': "),
        ({"queues": ["a b"]}, "workers.default.queues is ('a b',): "),
        ({"status_port": 70000}, "workers.default.status_port is 70000: Expected `int` <= 65535"),
        ({"log_level": "debgu"}, "workers.default.log_level: 'debgu' is none of "),
        ({"log_level": "debgu"}, "did you mean 'debug'?"),
        (
            {"environment": {"CELERY5_CONCURENCY": 4}},
            "workers.default.environment.CELERY5_CONCURENCY is no setting: did you mean CELERY5_CONCURRENCY?",
        ),
        (
            {"environment": {"CELERY5_LEASE": "long"}},
            "workers.default.environment.CELERY5_LEASE is 'long': 'long' is not a duration",
        ),
        (
            {"environment": {"CELERY5_BROKER": "ftp://x"}},
            "workers.default.environment.CELERY5_BROKER is no broker",
        ),
        (
            {"environment": {"CELERY5_BROKERS": '{"mails": "ftp://x"}'}},
            "workers.default.environment.CELERY5_BROKERS is no broker",
        ),
        ({"environment": {"CELERY5_BUDGETS": "x"}}, "workers.default.environment.CELERY5_BUDGETS is 'x': "),
        ({"environment": {"CELERY5_CONFG": "x"}}, "did you mean CELERY5_CONFIG?"),
    ],
)
def test_a_wrong_value_is_told_in_one_line_with_its_key(said: Mapping[str, object], wrong: str) -> None:
    with pytest.raises(Misconfigured) as caught:
        parse_cluster({"workers": {"default": said}}, DescriptionChecker())
    assert wrong in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "said",
    [
        {"broker": "redis://:hunter2@host:port/0"},
        {"broker": "unix:///s.sock?password=hunter2&strange=1"},
        {"environment": {"CELERY5_BROKER": "redis://me:hunter2@host:port/0"}},
        {"environment": {"CELERY5_BROKERS": '{"mails": "redis://:hunter2@host"'}},
    ],
)
def test_what_is_told_of_a_wrong_value_shows_no_password(said: Mapping[str, object]) -> None:
    with pytest.raises(Misconfigured) as caught:
        parse_cluster({"workers": {"default": said}}, DescriptionChecker())
    assert "hunter2" not in str(caught.value)


def test_flags_of_publishers_are_judged_as_their_settings() -> None:
    with pytest.raises(Misconfigured, match="connections is '9"):
        parse_cluster({"publishers": {"default": {"connections": "9..1"}}}, DescriptionChecker())


def test_what_members_can_use_passes() -> None:
    environment = {
        "CELERY5_CONCURRENCY": 4,
        "CELERY5_CONFIG": "redis",
        "CELERY5_MY_OWN": "x",
        "CELERY5_LEASE": "",
        "CELERY5_BROKERS": '{"mails": "redis://there"}',
        "CELERY5_ROUTES": '{"a*": "mails"}',
        "PATH": "/bin",
    }
    flags = {"max_memory": "500 MiB", "queues": ["a", "b"], "grace_period": 0, "reload": False, "max_jobs": 0}
    workers = {"default": {**flags, "log_level": "debug", "broker": "", "environment": environment}}
    parse_cluster(
        {"workers": workers, "publishers": {"default": {"tcp": "127.0.0.1:7070"}}}, DescriptionChecker()
    )
