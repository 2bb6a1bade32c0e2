"""Distribution: the sdist, and the wheel made from it, carry every folder of the package as a real one."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import celery5
from tests.house.sources import HERE, LINKED_FOLDERS, PACKAGE, files

BUILD = """
import sys, setuptools.build_meta as backend
print(getattr(backend, "build_" + sys.argv[1])(sys.argv[2]))
"""
WANTED = (
    *(".py", ".lua", ".json", ".typed", ".sh", ".js", ".toml", ".yml", ".html", ".css", ".svg"),
    *(".yaml", "Dockerfile", ".dockerignore"),
)
DATA_FOLDERS = {"systemd": "*", "docs": "*.md"}
"""Folders at the top that are linked inside `celery5/` for their data: which of their files belong in the archives."""


AT_THE_TOP = ("CHANGELOG.md", "LICENSE", "README.md", "SECURITY.md")
"""Pages that the sdist has at its top."""


def build(kind: str, source: Path, target: Path) -> Path:
    """Build `kind` with the backend itself: without its own environment, and so without the network."""
    completed = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(target)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return target / completed.stdout.split()[-1]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str], str]:
    """The names in the sdist, those in the wheel made from it, and the wheel's metadata.

    It is made of what Docker lets through for the image, which so has all that the package needs, and of what only the
    sdist has.
    """
    room = tmp_path_factory.mktemp("dist")
    source = room / "source"
    source.mkdir()
    for name in ("MANIFEST.in", *AT_THE_TOP, *list_docker_context()):
        if (HERE / name).is_dir():
            left_out = shutil.ignore_patterns("__pycache__")
            shutil.copytree(HERE / name, source / name, symlinks=True, ignore=left_out)
        else:
            shutil.copy(HERE / name, source)
    sdist = build("sdist", source, room)
    with tarfile.open(sdist) as opened:
        # Python 3.11.2, which Debian 12 has, knows no filters, and 3.12 warns without one.
        opened.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        opened.extractall(room / "unpacked")
        in_sdist = {member.name.partition("/")[2] for member in opened.getmembers() if member.isfile()}
    (unpacked,) = (room / "unpacked").iterdir()
    folders = (*LINKED_FOLDERS, *DATA_FOLDERS)
    assert not any((unpacked / "celery5" / linked).is_symlink() for linked in folders)
    wheel = build("wheel", unpacked, room)
    with zipfile.ZipFile(wheel) as opened_wheel:
        names = set(opened_wheel.namelist())
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        return in_sdist, names, opened_wheel.read(metadata).decode()


def list_docker_context() -> list[str]:
    """Return what the Dockerfile can copy."""
    ignored = (HERE / "examples" / "containers" / "Dockerfile.dockerignore").read_text().splitlines()
    return [line.removeprefix("!") for line in ignored if line.startswith("!")]


def expected() -> set[str]:
    """Every file of the package by its place in the archives."""
    every = [path for suffix in WANTED for path in files(*PACKAGE, suffix=suffix)]
    every += [file for folder, names in DATA_FOLDERS.items() for file in (HERE / folder).rglob(names)]
    inside = [path.relative_to(HERE) for path in every if path.is_file()]
    return {(path if path.parts[0] == "celery5" else Path("celery5") / path).as_posix() for path in inside}


def test_the_sdist_carries_every_file_of_every_room(archives: tuple[set[str], set[str], str]) -> None:
    in_sdist, _, _ = archives
    assert (expected() | {*AT_THE_TOP}) - in_sdist == set()


def test_the_wheel_carries_the_same_and_nothing_at_the_top_but_the_package(
    archives: tuple[set[str], set[str], str],
) -> None:
    _, in_wheel, _ = archives
    modules = {name for name in in_wheel if ".dist-info/" not in name}
    assert modules == expected()


def test_the_wheel_has_its_licence_and_its_command(archives: tuple[set[str], set[str], str]) -> None:
    _, in_wheel, metadata = archives
    assert any(name.endswith("/licenses/LICENSE") for name in in_wheel)
    assert any(name.endswith("/entry_points.txt") for name in in_wheel)
    assert "License-Expression: BSD-3-Clause" in metadata


def test_the_wheel_has_the_version_that_the_package_says(archives: tuple[set[str], set[str], str]) -> None:
    _, _, metadata = archives
    assert f"\nVersion: {celery5.__version__}\n" in metadata
