"""The tables that people read, made from results.json."""
