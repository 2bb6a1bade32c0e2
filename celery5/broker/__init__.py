"""Broker: the one room that knows Redis: keys, calls, Lua, and connections of three colours.

Floor: broker. Reads: nothing. Writes: nothing.
"""
