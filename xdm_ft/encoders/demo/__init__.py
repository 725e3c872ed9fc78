"""The tiny CLIP that comes with the package, and the script that trained it."""
