"""Docs search: what readers look for is what the search of the built site finds first.

`python -m tests.house.docs_search site` asks the search itself, in node; `nox -s docs` runs it.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[2]

PAGE = HERE / "docs" / "guide" / "celery-words.md"
SCRIPT = HERE / "tests" / "house" / "search_site.js"
FIRST = 3
"""Results among which the answer must be."""
TASKS = {
    "rolling update": "guide/upgrading/",
    "rollback": "guide/upgrading/",
    "canary": "guide/controller/",
    "dead letter": "guide/dead-letters/",
    "docker": "guide/containers/",
    "fastapi": "guide/fastapi/",
    "django": "guide/django/",
    "health check": "guide/health/",
    "sentry": "guide/tracing/",
    "prometheus": "guide/metrics/",
}
"""What else readers look for, and the page that has it."""


def read_words() -> dict[str, set[str]]:
    """Return each of Celery's words on the page, and the pages to which its section leads."""
    words: dict[str, set[str]] = {}
    for section in re.split(r"(?m)^## ", PAGE.read_text())[1:]:
        title, _, text = section.partition("\n")
        pages = set(re.findall(r"\]\((?:\.\./)?([\w/-]+)\.md", text))
        words |= dict.fromkeys(title.split(", "), pages)
    return words


def find_missed(found: dict[str, list[str]]) -> list[str]:
    """Return the words for which neither their section nor a page that it names is among the first results."""
    missed: list[str] = []
    for word, pages in read_words().items():
        first = found[word][:FIRST]
        is_found = any(
            place.startswith(("guide/celery-words/#", *(f"guide/{page}/" for page in pages)))
            for place in first
        )
        missed += [] if is_found else [f"{word}: {first}"]
    for words, page in TASKS.items():
        first = found[words][:FIRST]
        missed += [] if any(place.startswith(page) for place in first) else [f"{words}: {first}"]
    return missed


def main(site: Path) -> int:
    """Ask the search of a built site; return the exit code."""
    node = shutil.which("node")
    if node is None:
        print("not tried: the search of the documentation, since node is not installed")
        return 0
    asked = json.dumps({"site": str(site.resolve()), "queries": [*read_words(), *TASKS]})
    done = subprocess.run([node, str(SCRIPT)], input=asked, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-1000:])
        return 1
    missed = find_missed(json.loads(done.stdout))
    print("\n".join(missed) or f"found: {len(read_words()) + len(TASKS)} searches")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
