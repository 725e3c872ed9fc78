"""An encoder cut in two, and low-rank updates of it."""
