"""Parts of all routes: keys, bodies, errors, metrics, calls of participants; and the state of the gateway."""
