"""One model on Accelerate, encoder and head trained together."""
