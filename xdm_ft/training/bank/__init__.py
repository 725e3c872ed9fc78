"""The head bank: many models on cached features, trained together.

Everything of H models of one method is stacked to [H,…]: parameters, buffers, batches, learning rates. Heads never
touch each other: head h of a bank equals the same head trained alone to float32 rounding.
"""
