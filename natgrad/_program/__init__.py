"""The JAX program of one example, run on a batch with taps.

`trace` finds the sites, which are the equations where parameters meet data. A run records the inputs of every site, and
the tap at its result receives the cotangent: per-example statistics are computed from these two.

Imports no other room."""
