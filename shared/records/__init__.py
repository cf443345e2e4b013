"""What the stack keeps of queries and sessions, in Redis."""
