"""Command line: words on a terminal, thin over what any Python user can call.

`main.py` has the commands' tree, `boundary.py` turns errors into one line and an exit code, `loading.py` finds the
application.
"""
