"""Drivers, which perform calls on a broker, for plain Python, asyncio and Trio."""
