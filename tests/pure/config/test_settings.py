"""Settings: where each comes from, and all that is wrong at once."""

from typing import Any, get_args, get_type_hints

import pytest

from celery5 import App, Misconfigured
from celery5.config.settings import (
    PREFIX,
    Settings,
    find_hash_fault,
    get_descriptions,
    get_hash_limits,
    parse_value,
    read_settings,
)


def test_with_nothing_said_the_defaults_hold() -> None:
    found = read_settings({}, {})
    assert found == Settings()
    assert found.broker == "redis://127.0.0.1:6379/0"
    assert (found.processes, found.concurrency, found.lease, found.grace_period) == (1, 100, 10.0, 30.0)


def test_the_environment_beats_the_default_and_what_is_said_beats_both() -> None:
    environ = {"CELERY5_CONCURRENCY": "7", "CELERY5_LEASE": "2.5", "CELERY5_BROKER": "redis://there"}
    found = read_settings({"concurrency": 3, "lease": None}, environ)
    assert (found.concurrency, found.lease, found.broker) == (3, 2.5, "redis://there")


def test_an_empty_variable_says_nothing() -> None:
    assert read_settings({}, {"CELERY5_CONCURRENCY": ""}) == Settings()


def test_what_is_said_may_be_text_as_on_a_command_line() -> None:
    assert read_settings({"concurrency": "12", "grace_period": "0"}, {}).concurrency == 12


def test_every_error_is_told_at_once_with_its_origin() -> None:
    with pytest.raises(Misconfigured) as caught:
        read_settings(
            {"lease": 0, "colour": "red"}, {"CELERY5_CONCURRENCY": "many", "CELERY5_CPU_SLOTS": "0"}
        )
    errors = str(caught.value).split("; ")
    assert errors[0].startswith("setting 'colour' is not known")
    assert errors[1] == "all settings: celery5 docs settings"
    for origin in ("setting lease=0: ", "CELERY5_CONCURRENCY='many': ", "CELERY5_CPU_SLOTS='0': "):
        assert origin in str(caught.value)


@pytest.mark.parametrize(
    "said",
    [
        {"default_queue": ""},
        {"default_queue": "a b"},
        {"default_queue": "a{b"},
        {"default_queue": "a,b"},
        {"default_queue": "a\n"},
        {"results_ttl": 0},
        {"results_ttl": "inf"},
        {"results_ttl": "nan"},
        {"message_limit": 1},
        {"concurrency": 1.5},
        {"cpu_slots": -1},
        {"grace_period": -1},
        {"lease": "inf"},
        {"lease": 0.1},
        {"max_deliveries": 0},
        {"read_block": 0},
        {"read_block": 31},
    ],
    ids=str,
)
def test_a_setting_out_of_bounds_is_refused(said: dict[str, Any]) -> None:
    (name,) = said
    with pytest.raises(Misconfigured, match=f"setting {name}="):
        read_settings(said, {})
    with pytest.raises(Misconfigured, match=f"setting {name}="):
        App("settings", **said)


def test_flags_beat_settings_in_code_which_beat_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(PREFIX + "LEASE", "3")
    monkeypatch.setenv(PREFIX + "CONCURRENCY", "5")
    app = App("settings", concurrency=6)
    assert (app.settings.lease, app.settings.concurrency) == (3, 6)
    app.configure(concurrency=7, lease=None)
    assert (app.settings.lease, app.settings.concurrency) == (3, 7)
    with pytest.raises(Misconfigured, match="concurrency=0"):
        app.configure(concurrency=0)


def test_every_setting_is_explained_in_one_line() -> None:
    explained = get_descriptions()
    assert set(explained) == set(Settings.__struct_fields__)
    assert all(text and "\n" not in text for text in explained.values())


def test_a_misspelt_variable_is_told_and_a_stranger_is_left_alone() -> None:
    with pytest.raises(
        Misconfigured, match="CELERY5_CONCURENCY is no setting: did you mean CELERY5_CONCURRENCY"
    ):
        read_settings({}, {"CELERY5_CONCURENCY": "5"})
    assert read_settings({}, {"CELERY5_APP": "shop"}) == Settings()


NUMBERS = sorted(
    name for name, kind in get_type_hints(Settings).items() if {int, float} & {kind, *get_args(kind)} - {bool}
)


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_that_the_hash_in_redis_may_say_has_an_upper_bound(name: str) -> None:
    limit = get_hash_limits()[name]
    assert limit == "no" or limit.startswith("up to ")
    for said in ("1" + "0" * 300, "inf", "nan", 10**15):
        assert _is_refused(name, said)


def _is_refused(name: str, said: object) -> bool:
    try:
        parse_value(name, said)
    except Misconfigured:
        return True
    return find_hash_fault(name, said) != ""


@pytest.mark.parametrize("name", sorted(get_hash_limits()))
def test_the_hash_in_redis_says_only_what_is_marked_for_it(name: str) -> None:
    forbidden = {
        "broker",
        "brokers",
        "routes",
        "capacity",
        "inbox",
        "inbox_signatures",
        "keys",
        "keys_usage",
        "job_history",
        "alerts",
        "alert_oldest",
        "alert_failures",
        "alert_no_workers",
        "alert_dead",
        "alert_worker_deaths",
        "alert_worker_lost",
        "alert_member_missing",
        "alert_undo",
        "alert_stream_lag",
        "alert_loop_lag",
        "alert_memory",
        "alert_webhook",
        "alert_webhook_secret",
        "metrics_interval",
        "show_raw_values",
        "statsd",
        "status_host",
        "status_port",
        "worker_group",
    }
    if name in forbidden or name.startswith("publisher"):
        assert "cannot be set in the broker" in find_hash_fault(name, "1")
    else:
        assert find_hash_fault(name, str(getattr(Settings(), name))) == ""


def test_what_is_no_setting_is_told_of_by_the_settings_themselves() -> None:
    assert find_hash_fault("no_such_setting", "1") == ""
