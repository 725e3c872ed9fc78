"""A site that nobody has seen: how good the model is there, which images to label, and a model for this site alone."""
