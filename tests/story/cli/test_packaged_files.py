"""Commands that print or copy files of the package: pages of the documentation, and units for systemd."""

from pathlib import Path

import pytest

from tests.house.sources import HERE
from tests.story.cli.commands import celery5

UNITS = {unit.name: unit.read_text() for unit in (HERE / "systemd").iterdir()}


def read(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


def test_a_page_is_printed_by_its_path_or_the_end_of_it(tmp_path: Path) -> None:
    page = (HERE / "docs" / "guide" / "types.md").read_text()
    for name in ("docs/guide/types.md", "guide/types", "types"):
        ended = celery5("docs", name, cwd=tmp_path)
        assert (ended.code, ended.out, ended.err) == (0, page + "\n", "")


def test_of_pages_with_one_name_that_of_the_guide_is_printed(tmp_path: Path) -> None:
    for name in ("streams", "guide/streams"):
        assert celery5("docs", name, cwd=tmp_path).out == (HERE / "docs/guide/streams.md").read_text() + "\n"
    assert (
        celery5("docs", "reference/streams", cwd=tmp_path).out
        == (HERE / "docs/reference/streams.md").read_text() + "\n"
    )


def test_all_pages_are_listed_with_their_titles(tmp_path: Path) -> None:
    lines = celery5("docs", cwd=tmp_path).out.splitlines()
    assert len(lines) == 1 + len(list((HERE / "docs").rglob("*.md")))
    assert "docs/guide/tasks.md" in [line.split()[0] for line in lines if line.endswith("  Tasks")]


def test_an_unknown_page_is_answered_with_a_similar_one(tmp_path: Path) -> None:
    ended = celery5("docs", "taks", cwd=tmp_path)
    assert (ended.code, ended.out) == (2, "")
    assert "no page 'taks'; did you mean 'tasks'?" in ended.error


@pytest.mark.parametrize("words", [["acks_late"], ["visibility", "timeout"], ["Result-Backend"], ["flower"]])
def test_words_that_name_no_page_are_looked_for_in_all_pages(tmp_path: Path, words: list[str]) -> None:
    ended = celery5("docs", *words, cwd=tmp_path)
    assert (ended.code, ended.err) == (0, "")
    _, first, *others = ended.out.splitlines()
    assert first.startswith("docs/guide/celery-words.md")
    assert "_".join(words).lower().replace("-", "_") in first.replace(" ", "_")
    assert 1 <= len(others) < 10


def test_units_are_copied_to_the_folder_of_the_user(tmp_path: Path) -> None:
    ended = celery5("systemd", "install", cwd=tmp_path, env={"XDG_CONFIG_HOME": str(tmp_path)})
    folder = tmp_path / "systemd" / "user"
    assert (ended.code, read(folder)) == (0, UNITS)
    assert ended.out.splitlines() == [str(folder / name) for name in sorted(UNITS)]
    assert "systemctl --user daemon-reload" in ended.err


def test_units_that_differ_are_replaced_only_with_yes(tmp_path: Path) -> None:
    folder = tmp_path / "units"
    assert celery5("systemd", "install", "units", cwd=tmp_path).code == 0
    assert celery5("systemd", "install", "units", cwd=tmp_path).code == 0, (
        "nothing differs, so nothing is asked"
    )
    (folder / "celery5.target").write_text("mine\n")
    (folder / "other.service").write_text("kept\n")
    asked = celery5("systemd", "install", "units", cwd=tmp_path)
    assert asked.code != 0
    assert "Replace celery5.target in units?" in asked.err
    assert (folder / "celery5.target").read_text() == "mine\n"
    assert celery5("systemd", "install", "units", "--yes", cwd=tmp_path).code == 0
    assert read(folder) == UNITS | {"other.service": "kept\n"}


def test_a_folder_for_units_that_cannot_be_written_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = celery5("systemd", "install", "file/units", cwd=tmp_path)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "Error: file/units: the units cannot be written there: Not a directory\n"
