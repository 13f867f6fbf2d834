"""Runs the JAX program of one example with taps: finds the sites at which parameters meet data, and records what
per-example statistics need there.

Imports no other room."""
