"""Installed: is the wheel whole? `nox -s package` asks with a fresh environment's Python, away from the checkout."""

import importlib
import os
import pkgutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import celery5
from celery5.broker.servers.embedded import EmbeddedServer

LINKED_FOLDERS = ("services", "bootsteps", "examples")
COMMAND = str(Path(sys.executable).with_name("celery5"))


SHOP = """
from celery5 import App

app = App("installed")


@app.task
async def double(number: int) -> int:
    return 2 * number


@app.task
def shout(text: str) -> str:
    return text.upper()
"""


def main(source: Path) -> None:
    """Compare what is installed with the source tree, import every module of it, read its data, and run jobs."""
    compare(source)
    read_data(source)
    run_jobs()


OF_DJANGO = ("celery5.contrib.django.", "celery5.examples.django_shop.")
"""What only a Django project imports, where Django is installed."""


def compare(source: Path) -> None:
    """Every file of the source tree is installed, and every module imports."""
    home = Path(str(files("celery5")))
    if home.is_relative_to(source):
        raise SystemExit(f"celery5 was imported from the source tree, {home}, and not from the wheel")
    for room in LINKED_FOLDERS:
        if (home / room).is_symlink() or not (home / room).is_dir():
            raise SystemExit(f"celery5/{room} is no real folder in the wheel")
    there = {path.relative_to(source / "celery5") for path in _sources(source / "celery5")}
    missing = sorted(str(path) for path in there if not (home / path).is_file())
    if missing:
        raise SystemExit(f"not in the wheel: {', '.join(missing)}")
    set_up_django()
    names = [module.name for module in pkgutil.walk_packages(celery5.__path__, "celery5.")]
    for name in names:
        if not name.endswith("__main__") and not name.startswith(OF_DJANGO):
            importlib.import_module(name)
    print(f"{len(there)} files and {len(names)} modules are in the wheel, and import")


def set_up_django() -> None:
    """Be a Django project, that of the example, since modules of celery5.contrib.django need one."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "celery5.examples.django_shop.settings"
    importlib.import_module("django").setup()


def read_data(source: Path) -> None:
    """The commands that print or copy files of the package find them: pages, units, monitoring, manifests."""
    for page in sorted((source / "docs").rglob("*.md")):
        name = page.relative_to(source).as_posix()
        if _output("docs", name) != page.read_text() + "\n":
            raise SystemExit(f"celery5 docs {name} prints something else")
    _output("systemd", "install", "units")
    units = {unit.name: unit.read_bytes() for unit in (source / "systemd").iterdir()}
    if {unit.name: unit.read_bytes() for unit in Path("units").iterdir()} != units:
        raise SystemExit("celery5 systemd install copied other units")
    _output("metrics", "rules")
    _output("metrics", "dashboard")
    print(f"the commands of the wheel have the pages and {len(units)} units")


def _output(*words: str) -> str:
    done = subprocess.run([COMMAND, *words], check=True, timeout=30, stdout=subprocess.PIPE, text=True)
    return done.stdout


def run_jobs() -> None:
    """Send jobs to a worker that is started as a user would start it, and wait for what they give."""
    Path("shop.py").write_text(SHOP)
    sys.path.insert(0, os.getcwd())
    with EmbeddedServer.start() as server:
        os.environ["CELERY5_BROKER"] = server.url
        shop = importlib.import_module("shop")
        double, shout = shop.double.delay(21), shop.shout.delay("done")
        command = [COMMAND, "-A", "shop", "worker", "start", "--burst"]
        subprocess.run(command, check=True, timeout=30, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        given = (double.get(timeout=30), shout.get(timeout=30))
        if given != (42, "DONE"):
            raise SystemExit(f"the jobs gave {given}")
    print("a worker of the installed command ran two jobs")


def _sources(folder: Path) -> list[Path]:
    """Every file that belongs in the wheel; the links to the top-level rooms are followed."""
    wanted = (".py", ".lua", ".json", ".typed")
    plain = [path for path in folder.rglob("*") if path.suffix in wanted or path.name == "py.typed"]
    linked = [path for room in LINKED_FOLDERS for path in (folder / room).rglob("*") if path.suffix in wanted]
    return [path for path in dict.fromkeys([*plain, *linked]) if path.is_file()]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
