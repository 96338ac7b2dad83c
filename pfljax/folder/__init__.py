"""What a run leaves behind: identity, manifest, checkpoints, history, locks."""
