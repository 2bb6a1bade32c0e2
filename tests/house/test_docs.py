"""Docs: the tables of the reference are complete and current."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import click
import pytest

import celery5
from celery5 import errors, streams
from celery5.broker.calls.queues import QueueState
from celery5.cli.main import cli
from celery5.cli.standalone.info import _queues as queue_rows
from celery5.config.settings import PREFIX, Settings, get_descriptions, get_hash_limits
from celery5.processes.worker_parts import WorkerParts
from celery5.protocol.job.job import Options
from celery5.protocol.job.states import JobState
from celery5.protocol.job.verdict import Reason
from celery5.results.job_details import AppState
from celery5.tasks.declaration import TaskOptions
from celery5.wiring import list_step_parts
from tests.house import setting_options
from tests.house.log_events import PROCESSES, collect_events
from tests.house.sources import HERE, files
from tests.house.test_parity import exists

DOCS = HERE / "docs"
NO_EVENTS = QueueState("events", 0, 0, 0, None, 0, None, 0, ())
PAGES = sorted(path for path in DOCS.rglob("*.md") if "decisions" not in path.parts)


def first_cells(page: Path) -> list[str]:
    """The first cell of each line of a page's tables that is one name, in order."""
    return re.findall(r"(?m)^\| `(\w+)` \|", page.read_text())


def settings_table() -> str:
    """The table of settings, made from the settings."""
    defaults = Settings()
    lines = [
        "| setting | in the environment | default | in the hash | is |",
        "|---|---|---|---|---|",
    ]
    limits = get_hash_limits()
    for name, text in get_descriptions().items():
        value = getattr(defaults, name)
        shown = f"{value:g}" if isinstance(value, float) else str(value) or "none"
        lines.append(f"| `{name}` | `{PREFIX}{name.upper()}` | {shown} | {limits[name]} | {text} |")
    return "\n".join(lines)


def test_arguments_of_app_are_written_from_the_settings() -> None:
    assert setting_options.OPTIONS.read_text() == setting_options.format_options(), (
        "run python -m tests.house.setting_options"
    )


def test_the_table_of_settings_is_made_from_the_settings() -> None:
    page = (DOCS / "guide" / "settings.md").read_text()
    _, _, rest = page.partition("<!-- settings:start -->\n")
    table, found, _ = rest.partition("\n<!-- settings:end -->")
    assert found
    assert table == settings_table(), f"docs/guide/settings.md should say:\n{settings_table()}"


def test_every_error_is_in_the_reference_and_nothing_else() -> None:
    defined = {
        name
        for name, candidate in vars(errors).items()
        if inspect.isclass(candidate)
        and issubclass(candidate, Exception)
        and candidate.__module__ == errors.__name__
    }
    of_streams = {name: getattr(streams, name) for name in streams.__all__}
    defined |= {
        name
        for name, candidate in of_streams.items()
        if inspect.isclass(candidate) and issubclass(candidate, Exception)
    }
    assert sorted(first_cells(DOCS / "reference" / "errors.md")) == sorted(defined)


def test_every_reason_for_a_dead_letter_is_in_the_guide() -> None:
    text = (DOCS / "guide" / "failures.md").read_text()
    assert [reason for reason in Reason if f"\n| `{reason.value}` |" not in text] == []


@pytest.mark.parametrize("page", ["guide/results.md", "reference/states.md"])
def test_every_state_of_a_job_is_in_the_guide_and_in_the_reference(page: str) -> None:
    text = (DOCS / page).read_text()
    assert [state for state in JobState if f"\n| `{state}` |" not in text] == []


def test_every_column_of_info_is_explained_where_info_is_shown() -> None:
    state = AppState("shop", {"mail": QueueState("mail", 0, 0, 0, None, 0, None, 0, ())}, None, NO_EVENTS, ())
    (row,) = queue_rows(state)
    _, _, text = (DOCS / "guide" / "cli.md").read_text().partition("celery5 -A shop info\n")
    explained = (
        "waiting",
        "scheduled",
        "dead",
        "queue",
        "workers",
        "next due",
        "oldest dead",
    )  # say it themselves
    assert [word for word in row if word not in explained and f"`{word}`" not in text] == []


def options_table(page: str) -> list[str]:
    """The names in the first column of the table of options on a page of the guide."""
    text = (DOCS / "guide" / f"{page}.md").read_text()
    _, _, section = text.partition("\n## Options\n")
    table = re.search(r"(?m)(^\|.*\n)+", section)
    return re.findall(r"`(\w+)`", " ".join(re.findall(r"(?m)^\|([^|]*)\|", table[0]))) if table else []


def test_the_guide_has_every_option_of_a_declaration_and_of_a_call() -> None:
    assert sorted(options_table("tasks")) == sorted([*TaskOptions.__annotations__, "bind"])
    assert sorted(options_table("sending")) == sorted(Options.__struct_fields__)


def commands() -> list[str]:
    """Every command of `celery5`, with its group."""
    found = []
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        inner = command.list_commands(context) if isinstance(command, click.Group) else [""]
        found += [f"{name} {word}".strip() for word in inner]
    return found


def commands_of_the_table() -> list[str]:
    """The commands in the first table of the guide to the command line; a group is named at its first command."""
    text = (DOCS / "guide" / "cli.md").read_text()
    lines = "".join(re.findall(r"(?m)^\| command \| does .*\|\n(?:^\|.*\n)+", text))
    found: list[str] = []
    for cell in re.findall(r"(?m)^\| \[?(`.*?`)(?:\]\(.*?\))? \|", lines):
        first, *others = [
            " ".join(word for word in code.split() if word.islower() and word[0] not in "-[")
            for code in re.findall(r"`(.*?)`", cell)
        ]
        found += [first, *(f"{first.split()[0]} {other}" for other in others)]
    return found


def test_the_guide_has_every_command_and_nothing_else() -> None:
    assert sorted(commands_of_the_table()) == sorted(commands())


def test_the_guide_has_every_metric_of_every_process() -> None:
    sources = "\n".join(path.read_text() for path in files("celery5", "services"))
    named = set(re.findall(r'(?:gauge|counter|histogram|Family)\(\s*f?"(celery5_\w+)', sources))
    named -= {"celery5_schedules_"}  # made of what became of them
    assert len(named) > 20
    text = (DOCS / "guide" / "probes.md").read_text()
    assert sorted(name for name in named if f"`{name}" not in text) == []


def test_every_public_name_is_in_the_reference_and_nothing_else() -> None:
    text = (DOCS / "reference" / "api.md").read_text()
    packages = re.findall(r"(?m)^## (celery5(?:\.\w+)+)$", text)
    rendered = re.findall(r"(?m)^::: (\S+)$", text)
    offered = [f"{package}.{name}" for package in packages for name in import_module(package).__all__]
    # The last section has names of other modules, which pages of the guide use (`test_shown_names.py`).
    elsewhere = re.findall(r"(?m)^::: (\S+)$", text.partition("\n## Elsewhere\n")[2])
    of_packages = [name for name in rendered if name.count(".") > 1 and name not in elsewhere]
    assert sorted(of_packages) == sorted(offered)
    names = [*(name.rpartition(".")[2] for name in rendered), *first_cells(DOCS / "reference" / "errors.md")]
    assert {*celery5.__all__} <= {*names}


def test_the_log_messages_of_the_guide_are_written_somewhere() -> None:
    named = re.findall(r"`celery5:([a-z:-]+)`", (DOCS / "guide" / "logging.md").read_text())
    written = {*collect_events(HERE), *PROCESSES}  # the line that begins a process has its kind alone
    assert named
    assert [path for path in named if path not in written] == []


INTERNALS = (DOCS / "internals.md", *sorted((DOCS / "internals").glob("*.md")))


def test_internals_is_one_page_with_one_diagram() -> None:
    text = (DOCS / "internals.md").read_text()
    assert len(text.split()) <= 1000
    assert text.count("```mermaid") == 1


def test_the_index_of_the_guide_names_every_page_of_it() -> None:
    pages = {page.name for page in (DOCS / "guide").glob("*.md")} - {"index.md"}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "guide" / "index.md").read_text())) == pages


@pytest.mark.parametrize("page", INTERNALS, ids=lambda page: page.stem)
def test_every_file_that_internals_names_is_there(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"`((?:[\w-]+/)+[\w-]*(?:\.\w+)?)`", text)
    assert named
    assert [
        path for path in named if not ((HERE / path).exists() or (HERE / "celery5" / path).exists())
    ] == []


def boot_graph() -> list[str]:
    """The boot steps of the worker, each with the names of those that it starts after."""
    return [
        " ".join([step.step_name, *(other.step_name for other in step.after)])
        for step in list_step_parts(WorkerParts)
    ]


def test_internals_shows_the_boot_graph_of_the_worker() -> None:
    shown = re.findall(r"(?ms)^```text\n(.*?)^```$", (DOCS / "internals" / "worker.md").read_text())[0]
    assert sorted(" ".join(line.split()) for line in shown.splitlines()) == sorted(boot_graph())


def test_nobody_is_let_through_a_gate_before_it_is_known_who_is_suspended() -> None:
    requires = {name: needs for name, *needs in map(str.split, boot_graph())}
    assert "limits" in requires["admission"]


def anchors(page: Path) -> set[str]:
    """The anchors that mkdocs makes of a page's headings."""
    prose = re.sub(r"(?ms)^```.*?^```$", "", page.read_text())
    headings = re.findall(r"(?m)^#+ (.+)$", prose)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in link:
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.is_file() or (anchor and anchor not in anchors(target)):
                lost.append(link)
    assert lost == []


def test_every_fault_of_the_table_has_a_test_that_is_there() -> None:
    lines = [line for line in (DOCS / "faults.md").read_text().splitlines() if line.startswith("| ")]
    cells = [line.split(" | ")[-1] for line in lines if not line.startswith("| fault |")]
    assert cells
    assert [cell for cell in cells if not re.search(r"`[^`]+::test_", cell)] == []
    named = [node for cell in cells for node in re.findall(r"`([^`]+)`", cell)]
    assert [node for node in named if not exists(node)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_a_page_says_nothing_of_the_machine_that_it_was_written_on(page: Path) -> None:
    assert re.findall(r"/(?:work|opt|root)/\S*", page.read_text()) == []
