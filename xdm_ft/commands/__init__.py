"""One module per verb of `xdm-ft`, thin."""
