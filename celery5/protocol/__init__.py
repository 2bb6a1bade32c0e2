"""Protocol: values and decisions, pure: no clock, no Redis, no Trio.

Floor: protocol. Reads: nothing. Writes: nothing.
"""
