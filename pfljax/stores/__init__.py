"""Where clients' rows and examples live: on the devices, in host memory, on disk."""
