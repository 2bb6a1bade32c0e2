"""The services that scale workers and set their preferences."""
