"""What is asked of a stack, and about it."""
