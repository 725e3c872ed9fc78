"""Where an encoder's weights come from, and what serves its families."""
