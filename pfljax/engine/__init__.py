"""The exchange between clients and owners, and how it is laid out over devices and processes."""
