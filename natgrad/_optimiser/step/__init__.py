"""Step rules: how far to go along the natural gradient."""
