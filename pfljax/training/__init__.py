"""Training: the loop over rounds, checkpoints, history, client stores and the memory plan."""
