"""The ledger of results: every table of docs/results with its command, commit, machine and runs."""
