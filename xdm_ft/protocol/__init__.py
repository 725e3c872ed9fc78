"""Which images train, select and test: held-out domains, validation parts, groups, and the samplers of batches."""
