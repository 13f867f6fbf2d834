"""Experiments on a problem: compare methods, train with one, examine the geometry, and sum the results up in words."""
