"""Routes to tools, memory, knowledge, files, preferences, the bus and participants."""
