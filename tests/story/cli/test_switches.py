"""Switches: what a flag of `worker start` says, and what the environment says, is what the process is served with."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from celery5 import App
from celery5.cli.main import cli
from celery5.processes import foreground

FLAGS: dict[tuple[str, ...], tuple[str, object]] = {
    ("--broker", "redis://there:1/2"): ("broker", "redis://there:1/2"),
    ("--concurrency", "7"): ("concurrency", 7),
    ("--cpu-slots", "3"): ("cpu_slots", 3),
    ("--max-jobs", "5"): ("max_jobs", 5),
    ("--capacity", "gpu=2 vram_gb=auto"): ("capacity", "gpu=2 vram_gb=auto"),
    ("--max-memory", "500 MiB"): ("max_memory", "500 MiB"),
    ("--grace-period", "4.5"): ("grace_period", 4.5),
    ("--status-port", "8123"): ("status_port", 8123),
    ("--status-host", "127.0.0.7"): ("status_host", "127.0.0.7"),
    ("--no-inbox",): ("inbox", False),
    ("--no-inbox-signatures",): ("inbox_signatures", False),
    ("--keys", "/keys"): ("keys", "/keys"),
    ("--log-format", "console"): ("log_format", "console"),
    ("--log-level", "debug"): ("log_level", "debug"),
    ("--processes", "3"): ("processes", 3),
}
"""The flags that are settings: the words, the setting, its value."""
OPTIONS: dict[tuple[str, ...], tuple[str, object]] = {
    ("--queues", "a,b"): ("queues", ("a", "b")),
    ("--burst",): ("burst", True),
    ("--no-reload",): ("reload", False),
    ("--name", "w7"): ("name", "w7"),
    ("--processes", "2"): ("processes", 2),
    ("--processors", "none"): ("processors", ()),
}
"""The flags that say how one process is served."""
ELSEWHERE = {"config", "help"}
"""What other tests try."""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """What `serve` is called with, in place of serving; the application is the module `shop`."""
    seen = SimpleNamespace()
    monkeypatch.setattr(
        App, "perform", lambda *_args, **_more: None
    )  # with several processes it asks for Redis first
    module: Any = SimpleNamespace(app=App("shop"))
    monkeypatch.setitem(sys.modules, "shop", module)

    def serve(app: App, options: Any) -> int:
        seen.settings, seen.options = app.settings, options
        return 0

    monkeypatch.setattr(foreground, "serve", serve)
    yield seen
    module.app.close()


def start(*words: str) -> None:
    """Run `celery5 -A shop worker start` with these words."""
    ended = CliRunner().invoke(cli, ["-A", "shop", "worker", "start", *words], standalone_mode=False)
    assert ended.exception is None, ended.output
    assert ended.return_value == 0


@pytest.mark.parametrize("words", FLAGS, ids=lambda words: words[0])
def test_a_flag_is_what_its_setting_says(served: SimpleNamespace, words: tuple[str, ...]) -> None:
    name, value = FLAGS[words]
    start()
    assert getattr(served.settings, name) != value
    start(*words)
    assert getattr(served.settings, name) == value


@pytest.mark.parametrize("words", FLAGS, ids=lambda words: words[0])
def test_the_environment_says_the_same_and_a_flag_beats_it(
    served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    name, value = FLAGS[words]
    said = "no" if value is False else words[-1]
    monkeypatch.setenv(f"CELERY5_{name.upper()}", "false" if value is False else said)
    start()
    assert getattr(served.settings, name) == value
    others = {
        "broker": "redis://other:2/1",
        "status_host": "127.0.0.8",
        "keys": "/other",
        "capacity": "gpu=1",
        "log_format": "auto",
        "log_level": "info",
    }
    other = others.get(name, "2")
    start(f"--{name.replace('_', '-')}", *([] if value is False else [other]))
    assert getattr(served.settings, name) != value


@pytest.mark.parametrize("words", OPTIONS, ids=lambda words: words[0])
def test_a_flag_of_one_process_is_what_it_is_served_with(
    served: SimpleNamespace, words: tuple[str, ...]
) -> None:
    name, value = OPTIONS[words]
    start(*words)
    assert getattr(served.options, name) == value


def test_the_number_of_processes_is_set_in_the_four_ways_and_in_this_order(
    served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "celery5.toml"
    config.write_text("processes = 2\nlog_level = 'error'\nlog_format = 'console'\n")
    file = ("--config", str(config))
    start(*file)
    assert (served.options.processes, served.settings.log_level) == (2, "error")
    assert served.settings.log_format == "console"
    monkeypatch.setenv("CELERY5_PROCESSES", "3")
    start(*file)
    assert served.options.processes == 3
    module: Any = sys.modules["shop"]
    module.app.close()
    module.app = App("shop", processes=4, log_level="warning")
    start(*file)
    assert (served.options.processes, served.settings.log_level) == (4, "warning")
    start(*file, "--processes", "5", "--log-level", "debug")
    assert (served.options.processes, served.settings.log_level) == (5, "debug")


def test_a_member_of_a_cluster_is_one_process_whatever_the_setting(
    served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELERY5_PROCESSES", "3")
    monkeypatch.setenv("CELERY5_CONTROLLER_EPOCH", "1")
    start()
    assert served.options.processes == 1


def test_every_flag_of_a_worker_is_tried_here() -> None:
    context = click.Context(cli)
    group: Any = cli.get_command(context, "worker")
    command: click.Command = group.get_command(context, "start")
    tried = {name for name, _value in (*FLAGS.values(), *OPTIONS.values())}
    assert {parameter.name for parameter in command.params} - ELSEWHERE == tried
