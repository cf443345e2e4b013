"""What all routes share: keys, bodies, errors, metrics, calls of participants; and the state of the gateway itself."""
