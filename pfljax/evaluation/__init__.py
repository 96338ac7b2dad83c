"""Per-client metrics of what clients predict with."""
