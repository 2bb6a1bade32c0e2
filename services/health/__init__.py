"""The services that run health checks and circuit breakers, and answer probes."""
