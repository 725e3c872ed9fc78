"""What the paper measures on trained models, as functions of features, logits and labels. Tensors are on the CPU."""
