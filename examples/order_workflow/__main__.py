"""Place an order, decide on it, and show it: `python -m celery5.examples.order_workflow place|decide|show NUMBER`."""

import argparse
import sys

from celery5.errors import CeleryError
from celery5.examples.order_workflow import app, ledger
from celery5.examples.order_workflow.orders import Decision, order


def place(arguments: argparse.Namespace) -> None:
    """Place an order. It may be repeated: the number of the order is the id of its run."""
    run = order.options(id=f"order-{arguments.number}").start(arguments.number, arguments.items)
    sys.stdout.write(f"{run.id} {'is placed' if run.is_new else 'was placed before'}\n")


def decide(arguments: argparse.Namespace) -> None:
    """Approve an order, or refuse it."""
    Decision.delay(order=arguments.number, is_approved=arguments.answer == "yes", by=arguments.by)


def show(arguments: argparse.Namespace) -> None:
    """Show the state of an order, and what was done for it."""
    run = app.workflows.find(f"order-{arguments.number}")
    sys.stdout.write(f"{run.status().state if run else 'unknown'}\n")
    for entry in ledger.read(arguments.number):
        sys.stdout.write(f"  {entry.what} {entry.detail}".rstrip() + "\n")


def parse_arguments() -> argparse.Namespace:
    """Return the command, as the function `run`, and its arguments."""
    parser = argparse.ArgumentParser(prog="python -m celery5.examples.order_workflow")
    commands = parser.add_subparsers(required=True)
    for function in (place, decide, show):
        command = commands.add_parser(function.__name__, help=function.__doc__)
        command.set_defaults(run=function)
        command.add_argument("number", type=int, help="the number of the order")
        if function is place:
            command.add_argument("items", nargs="+")
        if function is decide:
            command.add_argument("answer", choices=["yes", "no"])
            command.add_argument("--by", required=True, help="who decides")
    return parser.parse_args()


if __name__ == "__main__":
    chosen = parse_arguments()
    try:
        chosen.run(chosen)
    except (CeleryError, OSError) as error:
        sys.exit(f"Error: {error}")
