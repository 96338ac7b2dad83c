"""Per-client metrics of the clients' predictors."""
