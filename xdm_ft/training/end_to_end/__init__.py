"""Trains one model, encoder and head together, on Accelerate."""
