"""The `local2` command line."""
