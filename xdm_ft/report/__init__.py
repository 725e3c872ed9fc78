"""What people read of results.json: tables."""
