"""What a process imports before it works: each module is time of each start, and memory of each process."""

import json
import subprocess
import sys
from pathlib import Path

from tests.story.cli.commands import COMMAND, LIMIT, environment

MODULES_OF_A_WORKER = 395
"""The most modules of celery5 that a worker with plain tasks has loaded when its first job runs."""
MODULES_OF_HELP = 95
"""The most that `celery5 --help` loads."""
NOT_IN_A_WORKER = {
    "apscheduler",
    "asyncio",
    "celery5.broker.drivers.cluster_on_trio",
    "celery5.cli.commands",
    "celery5.dashboard",
    "celery5.dead_letters",
    "celery5.doctor",
    "celery5.health.http_requests",
    "celery5.observability.webhook",
    "celery5.operations",
    "celery5.processes.controller",
    "celery5.processes.router",
    "celery5.processes.scheduler",
    "celery5.runners.asyncio_thread",
    "celery5.scheduling.schedules",
    "celery5.services.streams.processor_group",
    "celery5.streams.stream",
    "celery5.workflows.compiler",
    "celery5.workflows.run",
    "cryptography",
    "h11",
    "http.client",
    "jeepney",
    "joserfc",
    "opentelemetry",
    "redis",
    "starlette",
}
"""What such a worker does not load."""
LOADED = """
import json, sys
def loaded() -> str:
    late = sys.modules["celery5.lazy_modules"].LazyModule
    return json.dumps([name for name, module in sys.modules.items() if type(module) is not late])
"""
APPLICATION = f"""
from celery5 import App
{LOADED}
app = App("starts")

@app.task
async def list_loaded() -> str:
    return loaded()
"""


def list_own(modules: set[str]) -> list[str]:
    return sorted(name for name in modules if name.partition(".")[0] == "celery5")


def run(*command: str, cwd: Path, broker: str) -> str:
    """What a fresh interpreter prints."""
    env = environment(CELERY5_BROKER=broker)
    done = subprocess.run(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, text=True, timeout=LIMIT, check=True
    )
    return done.stdout


def test_a_worker_has_loaded_little_when_its_first_job_runs(url: str, tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(APPLICATION)
    send = "import starts; print(starts.list_loaded.delay().id)"
    job = run(sys.executable, "-c", send, cwd=tmp_path, broker=url).strip()
    run(*COMMAND, "-A", "starts", "worker", "start", "--burst", cwd=tmp_path, broker=url)
    get = f"import starts; print(starts.app.result({job!r}).get(timeout=10))"
    modules = set(json.loads(run(sys.executable, "-c", get, cwd=tmp_path, broker=url)))
    assert modules & NOT_IN_A_WORKER == set()
    assert len(list_own(modules)) <= MODULES_OF_A_WORKER, list_own(modules)


def test_help_loads_little(tmp_path: Path) -> None:
    code = f"from celery5.cli.main import cli\n{LOADED}\ncli.main(['--help'], standalone_mode=False)\nprint(loaded())"
    out = run(sys.executable, "-c", code, cwd=tmp_path, broker="")
    modules = set(json.loads(out.splitlines()[-1]))
    assert modules & {*NOT_IN_A_WORKER, "trio"} == {"celery5.operations"}
    assert len(list_own(modules)) <= MODULES_OF_HELP, list_own(modules)
