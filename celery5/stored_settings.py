"""Stored settings: which fields of the hash in Redis an application can use.

Anyone who can write to Redis can write there. So a field that cannot be used is skipped, whatever is wrong with it, and
no process ends because of it.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

import msgspec

from celery5.config.scaling import get_autoscale, get_prioritisation, merge_budgets
from celery5.config.settings import Settings, find_hash_fault, format_value, parse_value
from celery5.errors import Misconfigured
from celery5.extras import describe_installation
from celery5.logs.journald import JOURNAL_SOCKET
from celery5.protocol.masking import escape_text
from celery5.protocol.scaling.budget import Budget, check_task_budgets
from celery5.protocol.scheduling.zones import load_zone

MAX_FIELD_LENGTH = 64 * 1024
"""Characters of the longest value that is read."""
MAX_SHOWN = 200
"""Characters of a name or a fault that are shown."""
_NOT_TEXT = "�"
"""What stands for bytes that are not UTF-8."""

Check = Callable[[Settings], object]
"""Raises for settings that cannot be used."""


def filter_fields(
    fields: Mapping[str, str], last: Mapping[str, str], base: Settings, checks: Sequence[Check]
) -> tuple[dict[str, str], list[str]]:
    """Return the fields that can be used together, and what is wrong with the others, each with its name.

    In place of a field that cannot be used the value stays that was used before, if it is still to be set.

    Args:
        fields: All fields of the hash.
        last: The fields that were used before.
        base: The settings without the hash.
        checks: What else may refuse the settings.
    """
    usable: dict[str, str] = {}
    faults: list[str] = []
    settings = base
    for name in sorted(fields):
        for raw in (fields[name], *([last[name]] if name in last and last[name] != fields[name] else [])):
            try:
                settings = _apply(settings, name, raw, checks)
            except Exception as error:  # whatever a value makes a check do
                if raw is fields[name]:
                    faults.append(f"{_show(name)}: {_show(str(error) or type(error).__name__)}")
            else:
                usable[name] = raw
                break
    return usable, faults


def _apply(settings: Settings, name: str, raw: str, checks: Sequence[Check]) -> Settings:
    """Return the settings with one more field. Raises Misconfigured, and what the checks raise."""
    if name not in Settings.__struct_fields__:
        raise Misconfigured("there is no such setting")
    if len(raw) > MAX_FIELD_LENGTH:
        raise Misconfigured(f"its value has more than {MAX_FIELD_LENGTH} characters")
    if _NOT_TEXT in raw:
        raise Misconfigured("its value is not UTF-8")
    if fault := find_hash_fault(name, raw):
        raise Misconfigured(fault)
    try:
        changed = msgspec.structs.replace(settings, **{name: parse_value(name, raw)})
    except Exception as error:
        raise Misconfigured(f"its value {format_value(raw[:MAX_SHOWN])} is refused: {error}") from None
    for check in checks:
        check(changed)
    return changed


def check_environment(settings: Settings) -> None:
    """Check what the settings need of this machine. Raises Misconfigured."""
    load_zone(settings.timezone)
    get_autoscale(settings)
    get_prioritisation(settings)
    for is_used, module, extra in (
        (settings.sentry, "sentry_sdk", "sentry"),
        (settings.opentelemetry != "off", "opentelemetry", "otel"),
    ):
        if is_used and find_spec(module) is None:
            raise Misconfigured(f"it needs a package: {describe_installation(extra)}")
    if settings.log_format == "journal" and not os.path.exists(
        os.environ.get("CELERY5_JOURNAL_SOCKET") or JOURNAL_SOCKET
    ):
        raise Misconfigured("no journal listens on this machine")


def make_budget_check(kinds_by_task: Mapping[str, str], own: Mapping[str, Budget]) -> Check:
    """Return the check of budgets against the kinds of the application's tasks, and `own`, those of its code."""

    def check(settings: Settings) -> None:
        check_task_budgets(merge_budgets(settings, own), kinds_by_task)

    return check


def _show(text: str) -> str:
    shown = escape_text(text[:MAX_SHOWN])
    return shown if len(text) <= MAX_SHOWN else f"{shown}..."
