"""memory: remembers every answer, and finds what fits a query."""
