"""Origins: where each setting was said, and what is odd."""

from pathlib import Path
from typing import Any

import pytest

from celery5 import App
from celery5.config.settings import SettingOrigin, Settings, find_warnings, get_origins


def of(app: App, name: str) -> SettingOrigin:
    (found,) = [origin for origin in get_origins(app) if origin.setting == name]
    return found


def test_each_setting_says_where_it_was_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "celery5.toml"
    file.write_text("lease = 7\ncpu_slots = 3\nconcurrency = 1\ngrace_period = 1\n")
    monkeypatch.setenv("CELERY5_CPU_SLOTS", "5")
    app = App("origins", config=str(file), concurrency=20)
    app.configure(grace_period=9, status_port=None)
    assert of(app, "lease") == SettingOrigin("lease", 7.0, f"file {file}")
    assert of(app, "cpu_slots") == SettingOrigin("cpu_slots", 5, "CELERY5_CPU_SLOTS")
    assert of(app, "concurrency") == SettingOrigin("concurrency", 20, "code")
    assert of(app, "grace_period") == SettingOrigin("grace_period", 9.0, "flag --grace-period")
    assert of(app, "status_port") == SettingOrigin("status_port", None, "default")
    assert [origin.setting for origin in get_origins(app)] == list(Settings.__struct_fields__)


@pytest.mark.parametrize(
    ("said", "environ", "word"),
    [
        ({"time_limit": 5.0, "soft_time_limit": 5.0}, {}, "soft_time_limit=5 never comes"),
        ({"inbox_signatures": False}, {}, "inbox_signatures=False"),
        ({"status_port": 80, "status_host": "0.0.0.0"}, {}, "status_host=0.0.0.0"),
        ({}, {"CELERY5_COLOUR": "red"}, "CELERY5_COLOUR is in the environment"),
    ],
)
def test_what_is_allowed_and_hardly_meant_is_told(
    said: dict[str, Any], environ: dict[str, str], word: str
) -> None:
    (told,) = find_warnings(Settings(**said), environ)
    assert told.startswith(word)


def test_nothing_is_odd_about_the_defaults() -> None:
    assert find_warnings(Settings(), {"CELERY5_APP": "shop", "CELERY5_CONCURRENCY": "3", "HOME": "/"}) == []
