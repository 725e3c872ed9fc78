"""From rows of a data set to batches: decoding, transforms, splits and samplers."""
