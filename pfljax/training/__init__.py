"""How a run is trained: the loop over rounds, checkpoints, history, stores of clients and the memory plan."""
