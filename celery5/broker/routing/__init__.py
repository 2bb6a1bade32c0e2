"""Route calls and waits to one of several brokers."""
