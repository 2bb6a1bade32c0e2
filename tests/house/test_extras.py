"""Hints about a missing extra: they install what pyproject.toml lists, and one module makes them."""

import re
import tomllib
from pathlib import Path

import pytest

from celery5 import extras

ROOT = Path(__file__).parent.parent.parent
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


def expand(extra: str) -> list[str]:
    """Return the packages of an extra in pyproject.toml, also those of the extras that it includes."""
    packages: list[str] = []
    for line in EXTRAS[extra]:
        own = re.fullmatch(r"celery5\[(\w+)\]", line)
        packages += expand(own[1]) if own else [line.partition(";")[0]]
    return packages


@pytest.mark.parametrize("extra", EXTRAS)
def test_hint_of_an_extra_installs_its_packages_by_name(extra: str) -> None:
    assert extras.get_packages(extra) == expand(extra)
    hint = extras.describe_installation(extra)
    assert hint.startswith("pip install '")
    assert hint.endswith(f"(the extra celery5[{extra}])")


def test_hint_without_metadata_says_what_to_do_in_a_checkout() -> None:
    assert extras.describe_installation("none") == (
        "install celery5 with the extra none: pip install '.[none]' in its checkout"
    )


def test_only_the_module_extras_writes_how_to_install_an_extra() -> None:
    sources = [
        file
        for folder in ("celery5", "services", "bootsteps")
        for file in (ROOT / folder).rglob("*.py")
        if file.name != "extras.py"
    ]
    assert len(sources) > 500
    found = [file for file in sources if re.search(r"pip install [\"'\\]*celery5\[", file.read_text())]
    assert found == []
