"""What a client does on its own data: solvers, mini-batches, privacy."""
