"""What the commands of each noun show, and take, beside what follows from its operations."""
