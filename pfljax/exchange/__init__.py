"""The exchange between clients and model owners, and its layout over devices and processes."""
