"""What the encoders share: weight files read safely, downloads, corpora, the activation guard, the measured width."""
