"""The guide's page on Django: its files make a project, in which its scripts, commands and tests do what it says.

The other pages run in one process (`tests/story/examples/test_docs.py`), and Django has one configuration for each.
"""

import shlex
from pathlib import Path

from celery5.broker.servers.embedded import EmbeddedServer
from tests.story.django.projects import Project
from tests.story.examples.test_docs import DJANGO_PAGE, blocks, like

SEND = """
from django.test import Client
from celery5.testing import recorded
from orders.models import Order
from orders.tasks import send_receipt
order = Client().post("/orders/", {"customer": "ada"}).json()["order"]
send_receipt.delay(order).get()
print(Order.objects.get().receipt)
"""


def test_what_the_page_on_django_shows_is_what_happens(own_server: EmbeddedServer, tmp_path: Path) -> None:
    project = Project(tmp_path, CELERY5_BROKER=own_server.url)
    page = blocks(DJANGO_PAGE)
    for block in page:
        if block.title:
            project.write(block.title, block.text)
    migrated = project.manage("migrate", "--run-syncdb")
    assert migrated.code == 0, migrated.err
    with project.serve("worker", "start") as worker:
        worker.ready()
        assert project.run(SEND) == "receipt for ada\n"
        printed = ""
        for block in page:
            if block.language == "text":
                assert like(block.text).fullmatch(printed), f"line {block.line}: it printed\n{printed}"
            elif block.language == "python" and not block.title:
                printed = project.run(block.text)
                continue
            elif block.language == "sh":
                run_commands(project, block.text)
            assert not printed or block.language == "text", f"line {block.line}: before it, {printed}"
            printed = ""


def run_commands(project: Project, text: str) -> None:
    """Run the commands of `manage.py`; of one that serves the words are checked alone, by its help."""
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if words[:2] == ["python", "manage.py"]:
            ended = project.manage(*words[2:], *(["--help"] if "start" in words else []))
            assert ended.code == 0, ended.err
