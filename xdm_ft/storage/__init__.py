"""What survives a kill: atomic and checksummed files, checkpoints."""
