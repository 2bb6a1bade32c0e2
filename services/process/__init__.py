"""The services that every process runs: its lease, presence, reloading, systemd."""
