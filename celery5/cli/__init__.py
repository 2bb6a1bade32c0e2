"""The command line: a thin layer over what any Python program can call.

`main.py` has the tree of commands, `terminal/errors.py` turns errors into one line and an exit code, and
`terminal/loading.py` finds the application.
"""
