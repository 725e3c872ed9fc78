"""The head bank: many models on cached features, trained together.

The parameters, buffers, batches and learning rates of H models of one method are stacked to [H,…]. Heads do not affect
each other: head h of a bank equals the same head trained alone to float32 rounding.
"""
