"""Types, errors and pytree arithmetic for all other packages."""
