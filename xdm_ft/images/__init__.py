"""Images: found, decoded, transformed, loaded."""
