"""Experiments on a problem: comparing methods, training one, examining its geometry, and the verdict."""
