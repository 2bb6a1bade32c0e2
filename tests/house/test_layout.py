"""Layout: the links inside the package, and the strictness of the tools."""

import os
import subprocess
import tomllib

import pytest

from tests.house.sources import HERE, LINKED_FOLDERS

AT_THE_TOP = {
    *(
        ".ci",
        ".gitignore",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "MANIFEST.in",
        "README.md",
        "SECURITY.md",
    ),
    *("benchmarks", "bootsteps", "celery5", "docs", "examples", "mkdocs.yml", "noxfile.py", "pyproject.toml"),
    *("services", "systemd", "tests", "typings"),
}
TOOLS = tomllib.loads((HERE / "pyproject.toml").read_text())["tool"]


@pytest.mark.parametrize("folder", LINKED_FOLDERS)
def test_a_folder_at_the_top_is_a_relative_link_inside_the_package(folder: str) -> None:
    link = HERE / "celery5" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"
    assert (HERE / folder).is_dir()
    assert not (HERE / folder).is_symlink()


def test_git_keeps_the_links_as_links() -> None:
    links = [f"celery5/{folder}" for folder in LINKED_FOLDERS]
    try:
        completed = subprocess.run(
            ["git", "ls-files", "-s", *links],
            cwd=HERE,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except FileNotFoundError:
        return
    if completed.returncode != 0 or not completed.stdout:  # no checkout: an unpacked sdist, say
        return
    modes = {line.split("\t")[1]: line.split()[0] for line in completed.stdout.splitlines()}
    assert modes == dict.fromkeys(links, "120000")


def test_warnings_and_forgotten_failures_are_errors() -> None:
    options = TOOLS["pytest"]["ini_options"]
    assert options["filterwarnings"][0] == "error"
    assert options["xfail_strict"]
    assert (
        options["timeout"] <= 180
    )  # a test's own waits have limits of 30 s, and there may be a few in a row
    assert {"--strict-markers", "--strict-config"} <= set(options["addopts"])


def test_both_type_checkers_are_strict_and_look_at_the_whole_package() -> None:
    assert TOOLS["mypy"]["strict"] is True
    assert set(TOOLS["mypy"]["files"]) >= {"celery5", "tests"}
    assert TOOLS["basedpyright"]["typeCheckingMode"] == "strict"
    assert TOOLS["basedpyright"]["include"] == [
        "celery5",
        *(f"celery5/{folder}" for folder in LINKED_FOLDERS),
    ]
    assert "overrides" not in TOOLS["mypy"]


def test_every_relaxation_of_a_tool_says_why() -> None:
    lines = (HERE / "pyproject.toml").read_text().splitlines()
    off = [line for line in lines if line.startswith("report") and "false" in line]
    assert [line for line in off if "#" not in line] == []


CONTRACTS = TOOLS["importlinter"]["contracts"]
LAYERS = {contract["containers"][0]: contract for contract in CONTRACTS if contract["type"] == "layers"}


def get_drawn_tiers(number: int) -> list[list[str]]:
    page = (HERE / "docs" / "internals.md").read_text()
    return [line.split() for line in page.split("```text\n")[number].split("```")[0].splitlines()]


def test_internals_draws_the_tiers_that_the_import_contract_enforces() -> None:
    layers = LAYERS["celery5"]["layers"]
    tiers = layers[layers.index("app") + 1 : layers.index("runners | broker")]
    assert get_drawn_tiers(1) == [tier.split(" | ") for tier in tiers]


def test_internals_draws_the_tiers_of_services_that_the_contract_enforces() -> None:
    assert get_drawn_tiers(2) == [tier.split(" | ") for tier in LAYERS["celery5.services"]["layers"]]


def test_packages_of_one_layer_do_not_import_each_other() -> None:
    layers = [layer for contract in LAYERS.values() for layer in contract["layers"]]
    assert [layer for layer in layers if ":" in layer] == []


def test_every_module_belongs_to_a_layer() -> None:
    assert set(LAYERS) == {"celery5", "celery5.services", "celery5.processes", "celery5.migration"}
    for contract in LAYERS.values():
        assert contract["exhaustive"] is True
        assert "exhaustive_ignores" not in contract
        assert "ignore_imports" not in contract


def test_the_contract_against_circles_has_no_exception() -> None:
    (contract,) = [contract for contract in CONTRACTS if contract["type"] == "acyclic_siblings"]
    assert contract == {"name": contract["name"], "type": "acyclic_siblings", "ancestors": ["celery5"]}


def test_at_the_top_is_what_is_known() -> None:
    """A file that a test or an example writes into its working directory is easily committed."""
    try:
        listed = subprocess.run(
            ["git", "ls-files"], cwd=HERE, capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no checkout")
    assert {name.partition("/")[0] for name in listed.splitlines()} <= AT_THE_TOP
