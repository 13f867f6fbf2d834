"""`NaturalGradient` and what it is made of: structures, damping, step rules, momentum, guard, checkpoints.

Imports `_family`, `_program`, `_geometry`, `_uses`, `_point`, `_block`, `_metric`, `_solve`."""
