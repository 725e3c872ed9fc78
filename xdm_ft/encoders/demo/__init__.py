"""The tiny CLIP that comes with the package, and the scripts that trained it."""
