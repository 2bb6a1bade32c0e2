"""The service that performs bulk actions."""
