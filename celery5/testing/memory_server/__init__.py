"""A server in this process that runs our scripts on what it keeps in memory, so that tests need no other one.

It knows the commands that this package uses, and answers them as Redis does: the tests run the same calls on both.
"""
