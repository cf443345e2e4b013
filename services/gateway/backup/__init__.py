"""One file with everything that a stack keeps: written by `archive`, put back by `restore`, made of `sections`."""
