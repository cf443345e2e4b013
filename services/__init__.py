"""One folder per participant."""
