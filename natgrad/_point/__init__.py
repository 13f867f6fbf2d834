"""A model at its parameters on a batch: outputs, per-example gradients and their statistics.

Imports `_program`, `_geometry`, `_uses`."""
