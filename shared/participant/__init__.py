"""What makes a function a participant: the run loop, tools and their callers, the registry, settings, health."""
