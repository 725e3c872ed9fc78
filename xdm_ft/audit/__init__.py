"""Whether the data are what they say: copies, twin domains, label errors, site × class, what the encoder knows."""
