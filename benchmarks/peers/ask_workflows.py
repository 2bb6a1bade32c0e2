"""Ask for workflows: the command line that every peer's module of workflows answers.

    python peers/ask_workflows.py x_workflows fan_in N LAPS        N members and a body, so many times
    python peers/ask_workflows.py x_workflows chain N LAPS         a chain of N jobs, so many times
    python peers/ask_workflows.py x_workflows chains COUNT N       COUNT chains of N jobs at once
    python peers/ask_workflows.py x_workflows worker P C           P processes with C jobs at once in each, until killed

The producers print {"laps": [ms, ..], "began": ns}.
"""

import json
import sys
from importlib import import_module

from contract import Workflows, clock


def answer(module: str, verb: str, first: int, second: int) -> None:
    """Do what the command line says."""
    peer: Workflows = import_module(module).workflows
    verbs = {"fan_in": peer.fan_in, "chain": peer.chain, "chains": peer.chains, "worker": peer.worker}
    verbs[verb](first, second)
    print(json.dumps({"laps": clock.laps, "began": clock.began}), flush=True)


if __name__ == "__main__":
    answer(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
