"""The spectrum of a problem's metric at some parameters, on a sample of its data."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._manifold.rank import Rank, rank
from natgrad._optimiser.evaluation import Evaluation, Pass, evaluate
from natgrad._optimiser.problem import Bound, batches_of
from natgrad._optimiser.structure.exact import metric_of
from natgrad._problem import Problem
from natgrad.experiment.methods import num_outputs
from natgrad.experiment.run import compiled_by

# The largest matrix whose eigenvalues are computed.
LARGEST = 1200
# How far from a point, relative to its length, to look for a larger rank.
NEARBY = 1e-2


class SpectrumAt(NamedTuple):
    """The spectrum of the metric of some examples at a point. It is proper if the rank nearby is not larger. Limited by
    examples, the metric of all data may have a larger rank."""

    name: str
    step: int
    examples: int
    rank: int
    nullity: int
    is_limited_by_examples: bool
    is_proper: bool
    cutoff: float
    spectrum: list[float]

    @property
    def condition(self) -> float | None:
        """The largest eigenvalue over the smallest that counts."""
        return self.spectrum[0] / self.spectrum[self.rank - 1] if self.rank else None


class Spectrometer:
    """Finds spectra on as many examples, evenly spaced, as a matrix of moderate size allows."""

    def __init__(self, problem: Problem):
        self.problem = problem
        few = max(1, LARGEST // num_outputs(problem))
        self.sample = problem.shown() if problem.num_params <= LARGEST else thinned(problem, few)
        self._compiled: tuple[bool, Callable] | None = None
        self._rank = jax.jit(lambda params, sample: rank(metric_of(evaluation(problem, params, sample).parts)))

    def at(self, name: str, step: int, params: PyTree, deadline: float = math.inf) -> SpectrumAt:
        here, nearby = self._ranks(params, deadline)
        count, size, rows = int(here.rank), self.problem.num_params, here.spectrum.size
        return SpectrumAt(
            name,
            step,
            num_examples(self.problem, self.sample),
            count,
            size - count,
            rows < size,
            # Eigenvalues next to the cutoff come and go by rounding.
            int(nearby.rank) <= 1.02 * count,
            float(here.cutoff),
            np.maximum(np.asarray(here.spectrum, float), 0.0).tolist(),
        )

    def _ranks(self, params: PyTree, deadline: float) -> tuple[Rank, Rank]:
        """At the point and nearby, in double precision if the model can: in single, small eigenvalues are rounding."""
        if self._compiled is None:
            try:
                self._compiled = self._compile(params, True, deadline)
            except (TypeError, ValueError):
                self._compiled = self._compile(params, False, deadline)
        is_double, call = self._compiled
        with jax.enable_x64(is_double or jax.config.read("jax_enable_x64")):
            own, sample = (as_double(tree) if is_double else tree for tree in (params, self.sample))
            return call(own, sample), call(moved(own, NEARBY), sample)

    def _compile(self, params: PyTree, is_double: bool, deadline: float) -> tuple[bool, Callable]:
        with jax.enable_x64(is_double or jax.config.read("jax_enable_x64")):
            own, sample = (as_double(tree) if is_double else tree for tree in (params, self.sample))
            return is_double, compiled_by(deadline, self._rank, own, sample)


def bounds(problem: Problem, data: Any) -> list[Bound]:
    """The terms of a problem with some data."""
    return [Bound(term, term.outputs, own) for term, own in batches_of(problem.terms, data)]


def evaluation(problem: Problem, params: PyTree, data: Any) -> Evaluation:
    return evaluate(bounds(problem, data), params, Pass(1.0, jnp.array(0), has_sites=False))


def num_examples(problem: Problem, data: Any) -> int:
    return sum(bound.batch.size for bound in bounds(problem, data))


def thinned(problem: Problem, kept: int) -> Any:
    """So many of the training examples, evenly spaced."""
    if kept >= problem.num_examples:
        return problem.data

    def some(data: Any) -> Any:
        if data[0] is None:
            return data
        size = len(jax.tree.leaves(data[0])[0])
        rows = np.linspace(0, size - 1, max(1, kept * size // problem.num_examples)).astype(np.int32)
        return Problem.taken(data, rows)

    if None in problem.terms:
        return some(problem.data)
    return {name: some(own) for name, own in problem.data.items()}


def as_double(tree: PyTree) -> PyTree:
    wide = lambda leaf: leaf.astype(np.float64) if np.issubdtype(leaf.dtype, np.floating) else leaf
    return jax.tree.map(lambda leaf: jnp.asarray(wide(np.asarray(leaf))), tree)


def moved(params: PyTree, distance: float) -> PyTree:
    """Parameters a little away in a random direction."""
    flat, unflatten = _tree.flatten(params)
    noise = jax.random.normal(jax.random.key(0), flat.shape, flat.dtype)
    length = distance * jnp.maximum(jnp.linalg.norm(flat), 1e-3) / jnp.linalg.norm(noise)
    return unflatten(flat + length.astype(flat.dtype) * noise)
