"""Config commands: what the settings are, where they were said, and whether they can be used."""

import json
import os
from pathlib import Path

import pytest

from celery5.config import member_check
from celery5.config.member_check import GroupCheck, check_members
from celery5.protocol.cluster.description import parse_cluster
from tests.story.cli.commands import celery5


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(
        'from celery5 import App\napp = App("shop", config="celery5.toml", grace_period=20)\n'
    )
    (tmp_path / "celery5.toml").write_text("lease = 7\n")
    return tmp_path


def test_config_show_tells_each_value_and_where_it_was_said(shop: Path) -> None:
    env = {"CELERY5_BROKER": "redis://clerk:hush@127.0.0.1:1/0", "CELERY5_CPU_SLOTS": "3"}
    words = ("-A", "shop", "config", "show", "--concurrency", "7", "--no-inbox")
    said = celery5(*words, "--origin", "--json", cwd=shop, env=env)
    assert (said.code, said.err) == (0, "")
    found = {entry["setting"]: (entry["value"], entry["origin"]) for entry in json.loads(said.out)}
    assert found["broker"] == ("redis://clerk:***@127.0.0.1:1/0", "CELERY5_BROKER")
    assert found["cpu_slots"] == (3, "CELERY5_CPU_SLOTS")
    assert found["grace_period"] == (20.0, "code")
    assert found["lease"] == (7.0, "file celery5.toml")
    assert found["concurrency"] == (7, "flag --concurrency")
    assert found["inbox"] == (False, "flag --inbox")
    assert found["message_limit"] == (1048576, "default")

    lines = celery5(*words, "--origin", cwd=shop, env=env).out.splitlines()
    assert [word.strip() for word in lines[0].split()] == ["setting", "value", "origin"]
    assert "flag --concurrency" in next(line for line in lines if line.startswith("concurrency "))
    short = celery5(*words, cwd=shop, env=env).out
    assert "origin" not in short.splitlines()[0]
    assert "hush" not in short + "".join(lines) + said.out


def test_config_show_is_as_wide_as_the_terminal_but_for_a_long_value(shop: Path) -> None:
    env = {"CELERY5_BROKER": f"redis://{'x' * 150}:1/0", "COLUMNS": "90"}
    shown = celery5("-A", "shop", "config", "show", "--origin", cwd=shop, env=env)
    too_long = [line for line in shown.out.splitlines() if len(line) > 90]
    assert [line.split()[0] for line in too_long] == ["broker"]


def test_config_check_tells_all_that_is_wrong_at_once(shop: Path) -> None:
    good = celery5("-A", "shop", "config", "check", cwd=shop, env={"CELERY5_COLOUR": "red"})
    assert good.code == 0
    assert " settings can be used, 2 of them set: grace_period (code), lease (file celery5.toml)" in good.out
    assert good.err == "Warning: CELERY5_COLOUR is in the environment, and is no setting\n"

    (shop / "celery5.toml").write_text("lease = 0\nconcurency = 5\n")
    bad = celery5("-A", "shop", "config", "check", cwd=shop)
    assert bad.code == 2
    assert "lease in file celery5.toml=0" in bad.error
    assert "setting 'concurency' in file celery5.toml is not known; did you mean 'concurrency'?" in bad.error


def test_config_check_finds_what_only_its_user_would_find_wrong(shop: Path) -> None:
    wrong = celery5("-A", "shop", "config", "check", "--broker", "http://there", cwd=shop)
    assert (wrong.code, "http://there" in wrong.error) == (2, True)
    wrong = celery5("-A", "shop", "config", "check", cwd=shop, env={"CELERY5_PRIORITISE": "shop:nothing"})
    assert (wrong.code, "nothing" in wrong.error) == (2, True)
    said = '{"night": {"task": "shop.nothing", "every": 3}}'
    wrong = celery5("-A", "shop", "config", "check", cwd=shop, env={"CELERY5_SCHEDULES": said})
    assert (wrong.code, "shop.nothing" in wrong.error) == (2, True)


def test_config_check_looks_at_the_schedules_that_are_declared(shop: Path) -> None:
    (shop / "shop.py").write_text(
        'from celery5 import App\napp = App("shop")\n\n'
        '@app.task(schedule={"cron": "0 5 * * *", "timezone": "Mars/Base"})\ndef night() -> None: ...\n'
    )
    wrong = celery5("-A", "shop", "config", "check", cwd=shop)
    assert (wrong.code, wrong.out) == (2, "")
    assert "task shop.night: schedule: time zone 'Mars/Base'" in wrong.error


def test_config_check_blames_the_environment_for_what_is_wrong_there_and_no_module(shop: Path) -> None:
    (shop / "asking.py").write_text("from shop import app\n_ = app.settings\n")
    for target in ("shop", "asking:app"):
        bad = celery5("-A", target, "config", "check", cwd=shop, env={"CELERY5_CONCURENCY": "4"})
        assert bad.code == 2
        assert bad.error == "Error: CELERY5_CONCURENCY is no setting: did you mean CELERY5_CONCURRENCY?"
    (shop / "shop.py").write_text(
        'from celery5 import App\napp = App("shop", lease="long")\n_ = app.settings\n'
    )
    ours = celery5("-A", "shop", "config", "check", cwd=shop)
    assert "shop.py:" in ours.error, "what is said in code is told with its place"


def test_config_check_reads_the_cluster_description_that_is_there_or_named(shop: Path) -> None:
    (shop / "cluster.toml").write_text("[workers.default]\ncount = 2\nenvironment = { CELERY5_OWN = '1' }\n")
    good = celery5("-A", "shop", "config", "check", cwd=shop)
    assert good.code == 0
    assert good.out.splitlines()[1:] == [
        "cluster.toml: 2 members",
        f"  worker-default (2 members): ok, {shop / 'shop.py'}",
    ]
    assert good.err == "Warning: CELERY5_OWN is in cluster.toml, and is no setting\n"
    (shop / "other.toml").write_text("[workers.default]\nlog_level = 'lound'\n")
    bad = celery5("-A", "shop", "config", "check", "--cluster", "other.toml", cwd=shop)
    assert bad.code == 2
    assert bad.error == (
        "Error: cluster description other.toml: workers.default.log_level: 'lound' is none of "
        "debug, info, warning, error"
    )
    missing = celery5("-A", "shop", "config", "check", "--cluster", "none.toml", cwd=shop)
    assert (missing.code, "none.toml" in missing.error) == (2, True)


MEMBERS = """
[workers.good]
count = 2
[workers.mail]
environment = { PYTHONPATH = "broken" }
[routers.gone]
environment = { PYTHONPATH = "absent:." }
[workers.configured]
config = "absent.toml"
[workers.far]
hosts = ["north"]
[hosts.north]
"""


def test_config_check_loads_what_each_group_of_members_would_load(shop: Path) -> None:
    (shop / "broken").mkdir()
    (shop / "broken" / "shop.py").write_text("print('hello')\nimport nothing_here\n")
    (shop / "cluster.toml").write_text(MEMBERS)
    code = str(shop / "shop.py")
    bad = celery5("-A", "shop", "config", "check", "--json", cwd=shop)
    assert (bad.code, bad.error) == (1, "Error: cluster.toml: 3 of 6 members would not run as described")
    answer = json.loads(bad.out)
    assert (answer["code"], answer["cluster"]["members"]) == (code, 6)
    groups = {group.pop("group"): group for group in answer["cluster"]["groups"]}
    assert groups["worker-good"] == {"members": 2, "verdict": "ok", "why": "", "code": code}
    assert groups["worker-far"] == {"members": 1, "verdict": "not checked", "why": "on north", "code": ""}
    assert groups["router-gone"]["verdict"] == "wrong"
    assert groups["router-gone"]["why"] == "PYTHONPATH names absent, which does not exist"
    assert "No module named 'nothing_here'" in groups["worker-mail"]["why"]
    assert "absent.toml" in groups["worker-configured"]["why"]

    lines = celery5("-A", "shop", "config", "check", cwd=shop).out.splitlines()
    assert "  worker-far (1 member): not checked: on north" in lines
    assert "  router-gone (1 member): wrong: PYTHONPATH names absent, which does not exist" in lines
    alone = celery5("-A", "shop", "config", "check", "--no-cluster", "--json", cwd=shop)
    assert (alone.code, json.loads(alone.out)["cluster"]) == (0, None)


def test_config_check_loads_no_code_of_members_that_a_platform_runs(shop: Path) -> None:
    (shop / "own.py").write_text(
        "from unittest.mock import Mock\nfrom celery5.platform import Platform\n"
        "def make(cluster, app):\n    return Mock(spec=Platform)\n"
    )
    (shop / "cluster.toml").write_text('platform = "own:make"\n[workers.default]\n')
    good = celery5("-A", "shop", "config", "check", cwd=shop)
    assert (good.code, good.err) == (0, "")
    assert good.out.endswith("  worker-default (1 member): not checked: platform own:make runs it\n")


def test_member_check_loads_equal_groups_once_and_kills_those_that_hang(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shop / "shop.py").write_text(
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open('begun', 'a').write(f'{child.pid}\\n')\n"
        "child.wait()\n"
    )
    monkeypatch.chdir(shop)
    monkeypatch.setattr(member_check, "CHECK_LIMIT", 3.0)
    cluster = parse_cluster(b"[workers.one]\nqueues = ['a']\n[workers.two]\nqueues = ['b']\n")
    checks = check_members(cluster, "shop", ("config",))
    why = "its code was not loaded within 3 s"
    assert checks == [GroupCheck(f"worker-{name}", 1, "wrong", why) for name in ("one", "two")]
    (pid,) = (shop / "begun").read_text().split()
    assert not os.path.exists(f"/proc/{pid}") or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]
