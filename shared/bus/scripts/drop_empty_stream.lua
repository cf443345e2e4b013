-- Remove a stream without entries, with its groups. KEYS: stream. Returns 1 if it was removed, else 0.
return redis.call('XLEN', KEYS[1]) == 0 and redis.call('UNLINK', KEYS[1]) or 0
