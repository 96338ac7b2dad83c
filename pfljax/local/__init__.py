"""A client's work on its own data: solvers, mini-batches, privacy."""
