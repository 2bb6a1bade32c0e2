"""Projects: Celery projects as people have them, rebuilt after public ones, each in one file."""

import re
from pathlib import Path

PROJECTS = Path(__file__).parent / "projects"


def unpack(name: str, folder: Path) -> Path:
    """Write the files of a project into a folder, and return that."""
    text = (PROJECTS / f"{name}.txt").read_text()
    for part in re.split(r"(?m)^# file: ", text)[1:]:
        path, _, body = part.partition("\n")
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(body)
    return folder
