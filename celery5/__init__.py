"""celery5: a Trio-native distributed task runtime on Redis Streams.

Floor: the top of `celery5/`. Reads: nothing. Writes: nothing.
"""
