"""Queries and the sessions that they belong to."""
