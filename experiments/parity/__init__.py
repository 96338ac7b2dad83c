"""The same methods in pfljax and in other libraries' own code, round by round: `python -m experiments.parity`."""
