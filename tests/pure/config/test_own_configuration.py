"""Configurations of an application's own: whatever their code does, who starts reads one line, and what it says."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from celery5 import App, Misconfigured


class Backend:
    """A configuration that does something odd when it is loaded."""

    where = "the vault"

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load

    def load(self) -> Any:
        return self._load()

    async def watch(self) -> None:
        pass


class Failing(Mapping[str, Any]):
    """A mapping whose values cannot be had."""

    def __getitem__(self, name: str) -> Any:
        raise ConnectionError("sealed")

    def __iter__(self) -> Iterator[str]:
        yield "concurrency"

    def __len__(self) -> int:
        return 1


def fail(error: BaseException) -> Any:
    raise error


ODD: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (lambda: fail(ConnectionError("sealed")), "the vault fails: ConnectionError: sealed"),
    "exits": (lambda: fail(SystemExit(3)), "the vault fails: SystemExit: 3"),
    "number": (lambda: 7, "the vault: load() returned int: return a mapping"),
    "none": (lambda: None, "the vault: load() returned NoneType: return a mapping"),
    "list": (lambda: ["concurrency"], "the vault: load() returned list: return a mapping"),
    "name": (lambda: {7: 1}, "the vault: load() returned the name 7: names of settings are texts"),
    "value": (lambda: {"concurrency": object()}, "concurrency in the vault="),
    "unknown": (lambda: {"concurency": 1}, "'concurency' in the vault is not known"),
    "mapping": (Failing, "the vault fails: ConnectionError: sealed"),
}


@pytest.mark.parametrize("case", ODD)
def test_error_in_code_of_a_configuration_is_one_line_that_names_it(case: str) -> None:
    load, words = ODD[case]
    with pytest.raises(Misconfigured) as caught:
        _ = App("shop", config=Backend(load)).settings
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
