"""What stands between clients and server, for every method: samplers, attacks, robust rules."""
