"""The services that every process runs: presence, recycling, reloading, systemd."""
