"""Described: what is wrong with the values of a cluster description, as its members would find when they begin (C89).

Floor: processes. Reads: nothing. Writes: nothing.

A member with a wrong setting ends at once, with a line in its own log. Who reads the description asks here first.
"""

from collections.abc import Mapping
from typing import Any, cast

from celery5.broker.endpoint import Endpoint
from celery5.errors import BadBrokerURL, Misconfigured
from celery5.protocol.cluster_words import PUBLISHER_FLAGS, ValueChecker
from celery5.protocol.job import Options
from celery5.protocol.members import Kind
from celery5.settings import PREFIX, Settings, find_variable_fault, format_value, parse_value


class DescriptionChecker(ValueChecker):
    """Judges flags that are settings, and variables that say settings, by what settings may be."""

    def check_flag(self, kind: Kind, name: str, value: Any) -> str:
        """About a flag: a setting's value, or the names of queues."""
        setting = f"publisher_{name}" if name in PUBLISHER_FLAGS else name
        try:
            if name == "queues":
                for each in value:
                    Options(queue=each).checked()
            elif setting in Settings.__struct_fields__:
                _brokers(setting, parse_value(setting, str(value) if name == "max_memory" else value))
        except (Misconfigured, BadBrokerURL) as error:
            return f"is {format_value(value)}: {error}"
        return ""

    def check_variable(self, name: str, value: str) -> str:
        """About a variable: one of ours that is misspelt, or says what no such setting can be."""
        if fault := find_variable_fault(name, value):
            return fault
        setting = name.removeprefix(PREFIX).lower()
        try:
            if value and name in (f"{PREFIX}BROKER", f"{PREFIX}BROKERS"):
                _brokers(setting, parse_value(setting, value))
        except BadBrokerURL as error:
            return f"is no broker: {error}"
        return ""


def _brokers(setting: str, value: object) -> None:
    """Raises BadBrokerURL for a URL that is none."""
    if setting == "broker":
        Endpoint.from_url(str(value))
    elif setting == "brokers":
        for each in cast("Mapping[str, str]", value).values():
            Endpoint.from_url(each)
