"""Change the declarations of tasks."""
