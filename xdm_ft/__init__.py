"""xdm_ft: fine-tuning foundation models for domain generalization. Importing this package loads nothing heavy."""

__version__ = "0.1.0"
