"""Files that survive a killed process: atomic writes, checksums, checkpoints and the run directory."""
