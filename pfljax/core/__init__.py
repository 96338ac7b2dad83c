"""Types, errors and pytree arithmetic: what every floor speaks."""
