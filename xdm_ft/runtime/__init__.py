"""What every room stands on: errors, the terminal, progress, signals, random numbers, tensors, memory."""
