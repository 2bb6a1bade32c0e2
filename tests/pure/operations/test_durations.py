"""Durations: each parameter that is one takes a text such as `15m`, by each surface, and refuses others in one line."""

from typing import Any

import click
import pytest

from celery5.dashboard.forms import make_fields
from celery5.dashboard.openapi import make_openapi
from celery5.errors import Misconfigured
from celery5.operations.operation import Operation
from celery5.operations.parameters import Parameter, list_parameters
from celery5.operations.table import OPERATIONS
from celery5.protocol.durations import format_shortest
from tests.pure.operations.test_bounds import get_option, make_value

CASES = [
    (operation, parameter)
    for operation in OPERATIONS.values()
    for parameter in list_parameters(operation.parameters)
    if parameter.widget == "duration"
]
of_each_duration = pytest.mark.parametrize(
    ("operation", "parameter"), CASES, ids=[f"{case[0].name} {case[1].name}" for case in CASES]
)
NO_SPANS = {("task:search", "at"), ("worker:prefetch", "factor"), ("worker:concurrency", "factor")}
"""The numbers with a fraction that are a moment or a factor."""


def parse(operation: Operation, parameter: Parameter, value: object, *, is_text: bool) -> Any:
    """Return the value that the operation gets."""
    required = {
        field.name: content
        for field in list_parameters(operation.parameters)
        if (content := make_value(field, is_text=is_text)) is not None
    }
    asked = operation.parse({**required, parameter.name: value}, is_text=is_text)
    return getattr(asked, parameter.name)


def test_each_number_with_a_fraction_is_a_duration_or_a_known_other() -> None:
    others = {
        (operation.name, parameter.name)
        for operation in OPERATIONS.values()
        for parameter in list_parameters(operation.parameters)
        if parameter.kind is float and parameter.widget != "duration"
    }
    assert others == NO_SPANS


@of_each_duration
@pytest.mark.parametrize("is_text", [True, False], ids=["address", "api"])
def test_a_duration_may_be_a_text_or_a_number(
    operation: Operation, parameter: Parameter, is_text: bool
) -> None:
    assert parse(operation, parameter, "1m", is_text=is_text) == 60
    assert parse(operation, parameter, "60", is_text=is_text) == 60
    assert parse(operation, parameter, 60, is_text=is_text) == 60


@of_each_duration
@pytest.mark.parametrize("is_text", [True, False], ids=["address", "api"])
@pytest.mark.parametrize("wrong", ["soon", "15 minutes", "inf", "2026-12-24"])
def test_a_wrong_duration_is_refused_in_one_line_with_what_is_accepted(
    operation: Operation, parameter: Parameter, is_text: bool, wrong: str
) -> None:
    with pytest.raises(Misconfigured) as refused:
        parse(operation, parameter, wrong, is_text=is_text)
    assert str(refused.value) == (
        f"`{parameter.name}`: {wrong!r} is not a duration: write 30s, 15m, 2h, 1d12h or a number of seconds"
    )


@of_each_duration
def test_a_flag_takes_the_same_texts(operation: Operation, parameter: Parameter) -> None:
    option = get_option(operation, parameter)
    assert option.process_value(click.Context(click.Command("test")), "1m") == 60


def test_the_description_of_the_api_has_both() -> None:
    document = make_openapi()
    for operation, parameter in CASES:
        path = document["paths"][f"/api/v1/{{app}}/{operation.noun}/{operation.verb}"]
        if operation.is_change:
            reference = path["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            name = reference.rpartition("/")[2]
            schema = document["components"]["schemas"][name]["properties"][parameter.name]
        else:
            schema = next(entry for entry in path["get"]["parameters"] if entry["name"] == parameter.name)[
                "schema"
            ]
        kinds = [part["type"] for part in schema.get("anyOf", [schema])]
        assert ["number", "string"] in kinds, (operation.name, parameter.name)


@of_each_duration
def test_a_form_shows_the_default_as_it_is_given(operation: Operation, parameter: Parameter) -> None:
    field = next(field for field in make_fields(operation, {}) if field.name == parameter.name)
    assert field.kind == "text"
    shown = "" if not parameter.default else format_shortest(parameter.default)
    assert field.value == shown


@pytest.mark.parametrize("is_text", [True, False], ids=["address", "api"])
def test_a_wrong_time_is_refused_in_one_line_with_what_is_accepted(is_text: bool) -> None:
    add = OPERATIONS["schedule:add"]
    with pytest.raises(Misconfigured) as refused:
        add.parse({"name": "a", "task": "b", "at": "tomorrow"}, is_text=is_text)
    assert str(refused.value) == ("`at`: 'tomorrow' is not a time: write one like 2026-12-24T18:00:00+01:00")
