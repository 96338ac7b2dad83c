"""What a run is: its experiment, replicates, compiled programs and memory."""
