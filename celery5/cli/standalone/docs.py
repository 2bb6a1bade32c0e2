"""Print the pages of the documentation that came with this version (`docs`)."""

from importlib.resources import files
from pathlib import Path

import click

from celery5.cli.terminal.output import echo, format_table
from celery5.similar_names import did_you_mean


@click.command()
@click.argument("page", required=False)
def docs(page: str | None) -> None:
    """Print PAGE of the documentation of this version, such as docs/guide/tasks.md; without PAGE list all.

    Errors name pages by these paths. The end of a path is enough, `tasks` for example; pages of the guide go first.
    """
    pages = _list_pages()
    if page is None:
        echo(
            format_table(
                [{"page": path, "title": _read_title(text)} for path, text in pages.items()], empty=""
            )
        )
        return
    wanted = page.removesuffix(".md")
    found = [path for path in pages if f"/{path.removesuffix('.md')}".endswith(f"/{wanted}")]
    if not found:
        names = [path.removesuffix(".md").rpartition("/")[2] for path in pages]
        similar = did_you_mean(wanted.rpartition("/")[2], names, otherwise="celery5 docs lists all")
        raise click.UsageError(f"no page {page!r}; {similar}")
    echo(pages[min(found, key=lambda path: not path.startswith("docs/guide/"))])


def _list_pages() -> dict[str, str]:
    """Return the text of each page, by its path."""
    folder = Path(str(files("celery5"))) / "docs"
    return {
        f"docs/{path.relative_to(folder).as_posix()}": path.read_text(encoding="utf-8")
        for path in sorted(folder.glob("**/*.md"))
    }


def _read_title(text: str) -> str:
    return text.partition("\n")[0].removeprefix("# ")
