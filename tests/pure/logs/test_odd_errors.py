"""Odd errors: whatever their classes have redefined, all that describes an error says something, and never raises."""

import json

import pytest

from celery5.protocol.job.tracebacks import format_traceback
from celery5.protocol.masking import describe_error, get_error_text, get_type_name, show_error
from celery5.protocol.names import get_class_names, get_qualified_name
from celery5.runners.outcome import make_failure
from tests.odd_errors import ERRORS


@pytest.mark.parametrize("name", ERRORS)
def test_whatever_is_odd_about_an_error_it_can_be_described(name: str) -> None:
    try:
        raise ERRORS[name]()
    except BaseException as error:
        texts = [
            describe_error(error),
            describe_error(error, 50),
            show_error(error),
            get_error_text(error, 50),
        ]
        texts += [get_type_name(error), get_qualified_name(error), format_traceback(error)]
        names, failure = get_class_names(error), make_failure(error)
    assert {type(text) for text in (*texts, *names)} == {str}
    for text in (*texts, failure.type, failure.message, failure.traceback):
        json.dumps(text).encode("utf-8")
        text.encode("utf-8")  # no half of a pair is left
    assert names[-1] == "builtins.BaseException"
    assert "test_odd_errors.py" in failure.traceback


def test_names_of_ordinary_classes_are_those_that_a_policy_names() -> None:
    assert get_class_names(FileNotFoundError()) == (
        "builtins.FileNotFoundError",
        "builtins.OSError",
        "builtins.Exception",
        "builtins.BaseException",
    )
    assert get_class_names(json.JSONDecodeError("", "", 0))[0] == "json.decoder.JSONDecodeError"
