"""Configuration: each backend says what it says, a change is noticed, and mistakes are told."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from celery5 import App, Misconfigured
from celery5.config.configuration import (
    Configuration,
    ModuleConfiguration,
    RedisConfiguration,
    TomlConfiguration,
    make_configuration,
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def meant(said: Any) -> Configuration:
    return make_configuration(said, broker=lambda: "redis://there", key="a hash")


def write(path: Path, text: str) -> None:
    """As careful programs write: aside, then in one step in its place."""
    aside = path.with_suffix(".new")
    aside.write_text(text)
    aside.replace(path)


def test_a_module_says_settings_by_its_names(here: Path) -> None:
    (here / "shop_settings.py").write_text(
        "import os\nfrom pathlib import Path\n_each = 4\nconcurrency = 5 * _each\ndef lease(): ...\n"
    )
    assert dict(meant("shop_settings").load()) == {"concurrency": 20}
    assert "shop_settings" not in sys.modules


def test_a_module_is_read_anew_each_time(here: Path) -> None:
    backend = ModuleConfiguration("shop_changing")
    write(here / "shop_changing.py", "lease = 5\nconcurrency = 1")
    assert dict(backend.load()) == {"lease": 5, "concurrency": 1}
    write(here / "shop_changing.py", "concurrency = 2")
    assert dict(backend.load()) == {"concurrency": 2}


def test_toml_files_say_settings_and_pyproject_in_its_own_table(here: Path) -> None:
    (here / "celery5.toml").write_text("concurrency = 7")
    (here / "pyproject.toml").write_text("[project]\nname = 'shop'\n[tool.celery5]\nlease = 4.5")
    assert dict(meant("celery5.toml").load()) == {"concurrency": 7}
    assert dict(meant("pyproject.toml").load()) == {"lease": 4.5}
    (here / "celery5.toml").write_text("concurrency = 8", encoding="utf-8-sig")  # as Windows writes it
    assert dict(meant("celery5.toml").load()) == {"concurrency": 8}


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("no_such_module", "no configuration module no_such_module"),
        ("missing.toml", "file missing.toml: "),
        ("broken.toml", "file broken.toml: "),
        ("broken_module", "module broken_module fails: ZeroDivisionError"),
        ("shop/settings.py", "give a module's name"),
        (7, "give a module's name"),
    ],
)
def test_a_mistake_is_told_in_one_line(here: Path, said: Any, text: str) -> None:
    (here / "broken.toml").write_text("= 1")
    (here / "broken_module.py").write_text("1 / 0")
    with pytest.raises(Misconfigured) as caught:
        meant(said).load()
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hash_in_the_broker_is_meant_by_its_name() -> None:
    backend = meant("redis")
    assert isinstance(backend, RedisConfiguration)
    assert backend.where == "hash a hash"


@pytest.mark.parametrize("kind", ["toml", "module"])
async def test_a_change_is_noticed_and_only_a_change(here: Path, kind: str) -> None:
    path = here / ("c.toml" if kind == "toml" else "watched_settings.py")
    backend = TomlConfiguration(path) if kind == "toml" else ModuleConfiguration("watched_settings")
    write(path, "lease = 3")
    backend.load()
    with trio.move_on_after(1.5) as limit:
        await backend.watch()
    assert limit.cancelled_caught
    path.unlink()  # as some editors do, for a moment
    with trio.move_on_after(1.5) as limit:
        await backend.watch()
    assert limit.cancelled_caught
    write(path, "lease = 4")
    with trio.fail_after(5):
        await backend.watch()


def test_code_and_the_environment_beat_the_configuration_which_beats_the_default(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "c.toml").write_text("concurrency = 1\ncpu_slots = 1\nlease = 1")
    monkeypatch.setenv("CELERY5_CPU_SLOTS", "2")
    settings = App("shop", config="c.toml", concurrency=3).settings
    assert (settings.concurrency, settings.cpu_slots, settings.lease) == (3, 2, 1.0)


def test_the_configuration_may_be_named_in_the_environment(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "c.toml").write_text("concurrency = 11")
    monkeypatch.setenv("CELERY5_CONFIG", "c.toml")
    assert App("shop").settings.concurrency == 11


def test_an_application_reads_its_configuration_when_it_needs_it(here: Path) -> None:
    app = App("shop", config="later.toml")
    (here / "later.toml").write_text("broker = 'redis://there:7/0'")
    assert "there:7" in app.connections.masked_url
    with pytest.raises(Misconfigured, match="lease=0"):
        App("shop", config="later.toml", lease=0)


def test_errors_name_the_configuration(here: Path) -> None:
    (here / "c.toml").write_text("colour = 'red'\nlease = 0")
    with pytest.raises(Misconfigured) as caught:
        _ = App("shop", config="c.toml").settings
    assert "setting 'colour' in file c.toml is not known" in str(caught.value)
    assert "lease in file c.toml=0" in str(caught.value)


def test_what_is_read_anew_is_checked_first_and_then_applied(here: Path) -> None:
    (here / "c.toml").write_text("concurrency = 1")
    app = App("shop", config="c.toml")
    assert app.settings.concurrency == 1
    (here / "c.toml").write_text("concurrency = 0")
    with pytest.raises(Misconfigured):
        app.reload_configuration()
    (here / "c.toml").write_text("concurrency = 2\nlease = 5")
    changed, apply = app.reload_configuration()
    assert changed == ("concurrency", "lease")
    assert app.settings.concurrency == 1
    apply()
    assert app.settings.concurrency == 2
    assert app.reload_configuration()[0] == ()
    assert os.getcwd() == str(here)
