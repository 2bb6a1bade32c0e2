"""Find and read the files of a project, change spans of their text, and write them."""
