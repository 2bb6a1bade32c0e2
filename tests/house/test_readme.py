"""README and changelog: the two commands, the version, and what a release must have in all places."""

import re
import tomllib
from pathlib import Path

import pytest

import celery5

HERE = Path(__file__).parents[2]
README = (HERE / "README.md").read_text()
CHANGELOG = (HERE / "CHANGELOG.md").read_text()


def fenced(section: str) -> list[str]:
    """What is fenced in one `##` section of the README."""
    _, _, rest = README.partition(f"\n## {section}\n")
    body = re.split(r"(?m)^## ", rest)[0]
    return [block.strip() for block in re.findall(r"(?ms)^```\w*\n(.*?)^```$", body)]


@pytest.mark.parametrize("section", ["Run it", "Test it"])
def test_a_section_of_the_readme_has_one_fenced_command_of_one_line(section: str) -> None:
    (command,) = fenced(section)
    assert "\n" not in command
    assert command.startswith("python3 -m venv ")


def test_the_run_it_command_runs_the_demo_and_the_test_it_command_runs_bare_nox() -> None:
    assert fenced("Run it")[0].endswith("/celery5 demo")
    assert fenced("Test it")[0].endswith("/nox")


def test_the_measured_table_has_its_place() -> None:
    assert README.count("<!-- bench:start -->") == README.count("<!-- bench:end -->") == 1
    assert README.index("<!-- bench:start -->") < README.index("<!-- bench:end -->")


def test_every_link_of_the_readme_leads_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (HERE / link).is_file()] == []


def test_the_changelog_tells_of_this_version() -> None:
    assert f"\n## [{celery5.__version__}]" in CHANGELOG


def test_all_places_agree_on_the_version() -> None:
    """One commit makes a release: it changes `__version__`, the changelog, and what follows from them."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    assert ("version" in project, project["dynamic"]) == (False, ["version"])
    released = re.findall(r"(?m)^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}$", CHANGELOG)
    assert released[0] == celery5.__version__
    assert released == sorted(released, key=lambda version: [*map(int, version.split("."))], reverse=True)
    major, minor, _ = celery5.__version__.split(".")
    (status,) = [name for name in project["classifiers"] if name.startswith("Development Status")]
    assert status == f"Development Status :: {'4 - Beta' if major == '0' else '5 - Production/Stable'}"
    assert f"\n| {major}.{minor} | yes |" in (HERE / "SECURITY.md").read_text()
    shown = re.findall(r"(?:celery5|of version) (\d+\.\d+\.\d+)", (HERE / "docs/guide/doctor.md").read_text())
    assert {*shown} == {celery5.__version__}


@pytest.mark.parametrize("name", ["SECURITY.md", "docs/reference/compatibility.md"])
def test_a_page_names_1_0_only_before_its_release(name: str) -> None:
    text = (HERE / name).read_text()
    is_named = re.search(r"\b(?:before|from) 1\.0\b", text, re.IGNORECASE) is not None
    assert is_named == celery5.__version__.startswith("0.")


def test_the_changelog_begins_with_a_summary_for_newcomers() -> None:
    sections = re.findall(r"(?m)^## (.*)$", CHANGELOG)
    assert sections[0] == "celery5 in one minute"


def test_the_supported_pythons_are_the_same_everywhere() -> None:
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: 3."
    versions = [name.removeprefix(prefix) for name in project["classifiers"] if name.startswith(prefix)]
    supported = [f"3.{version}" for version in versions]
    (tested,) = re.findall(r"(?m)^SUPPORTED = \((.*)\)$", (HERE / "noxfile.py").read_text())
    assert re.findall(r'"([^"]+)"', tested) == supported
    assert project["requires-python"] == f">={supported[0]}"
    named = f"CPython {', '.join(supported[:-1])} and {supported[-1]}"
    for page in ("scope.md", "compatibility.md"):
        assert named in (HERE / "docs" / "reference" / page).read_text()


def test_the_table_of_extras_has_each_extra_and_its_packages() -> None:
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    text = (HERE / "docs" / "guide" / "install.md").read_text()
    rows = {
        row[0]: re.findall(r"`([^`]+)`", row[2])
        for row in re.findall(r"(?m)^\| `([a-z0-9]+)` \| ([^|]*) \| ([^|]*) \| (\[[^|]*) \|$", text)
    }
    assert rows == {
        extra: [re.split(r"[<>=;]", package)[0] for package in packages] for extra, packages in extras.items()
    }
