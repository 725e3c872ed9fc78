"""The verbs of `xdm-ft`, one module each."""
