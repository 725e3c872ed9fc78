"""Who is held out: splits, their parts and groups, and samplers."""
