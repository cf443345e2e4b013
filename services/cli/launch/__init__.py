"""`local2 run`: the whole stack on this machine, its processes and its Redis."""
