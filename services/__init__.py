"""One folder per participant."""

# first of all: see there
import shared  # noqa: F401
