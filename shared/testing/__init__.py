"""Stand-ins for what is outside: a model server that plays a script over real HTTP."""
