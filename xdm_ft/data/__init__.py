"""One file per data set. The file's stem is its name in a recipe; the keywords of its constructor are recipe keys."""
