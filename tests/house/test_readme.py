"""README and changelog: the two commands, and the version."""

import re
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]
README = (HERE / "README.md").read_text()


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
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    assert f"\n## [{project['version']}]" in (HERE / "CHANGELOG.md").read_text()
