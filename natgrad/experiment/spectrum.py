"""The spectrum and the rank of the metric of a problem at some parameters, on a sample of its data."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._manifold.rank import Rank, rank
from natgrad._optimiser.cost import Cost, CostPoint, Pass, term_on_batch
from natgrad._optimiser.structure.exact import metric_of
from natgrad._optimiser.term import batches_of
from natgrad._problem import Problem
from natgrad.experiment.methods import num_outputs
from natgrad.experiment.run import compile_before

# The largest matrix whose eigenvalues are computed.
LARGEST = 1200
# How far from a point, relative to its length, to look for a larger rank.
NEARBY = 1e-2


class SpectrumAt(NamedTuple):
    """The spectrum of the metric at a point, on some of the examples.

    `is_proper`: the rank does not grow nearby. `is_limited_by_examples`: the metric has fewer rows than parameters, so
    its rank may be larger with more data. Eigenvalues up to `cutoff` count as zero."""

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
        """The largest eigenvalue over the smallest one above the cutoff."""
        return self.spectrum[0] / self.spectrum[self.rank - 1] if self.rank else None


class Spectrometer:
    """Computes spectra on as many examples, evenly spaced, as give a matrix of at most `LARGEST` rows."""

    def __init__(self, problem: Problem):
        self.problem = problem
        size = max(1, LARGEST // num_outputs(problem))
        self.sample = problem.shown() if problem.num_params <= LARGEST else evenly_spaced(problem, size)
        self._compiled: tuple[bool, Callable] | None = None

        def rank_at(params: PyTree, sample: Any) -> Rank:
            return rank(metric_of(cost_point(problem, params, sample).points))

        self._rank = jax.jit(rank_at)

    def at(self, name: str, step: int, params: PyTree, deadline: float = math.inf) -> SpectrumAt:
        """The spectrum at `params`, which `name` and `step` describe; raises `OutOfTime` at the deadline."""
        here, nearby = self._ranks(params, deadline)
        count, size, rows = int(here.rank), self.problem.num_params, here.spectrum.size
        return SpectrumAt(
            name,
            step,
            num_examples(self.problem, self.sample),
            count,
            size - count,
            rows < size,
            # With some slack: eigenvalues next to the cutoff come and go by rounding.
            int(nearby.rank) <= 1.02 * count,
            float(here.cutoff),
            # A metric has no negative eigenvalues but for rounding, and the chart is logarithmic.
            np.maximum(np.asarray(here.spectrum, float), 0.0).tolist(),
        )

    def _ranks(self, params: PyTree, deadline: float) -> tuple[Rank, Rank]:
        """The ranks at a point and nearby, in double precision if the model accepts it.

        In single precision, small eigenvalues are lost to rounding."""
        if self._compiled is None:
            try:
                self._compiled = self._compile(params, True, deadline)
            except (TypeError, ValueError):
                self._compiled = self._compile(params, False, deadline)
        is_double, call = self._compiled
        with jax.enable_x64(is_double or jax.config.read("jax_enable_x64")):
            params, sample = (as_double(tree) if is_double else tree for tree in (params, self.sample))
            return call(params, sample), call(random_neighbour(params, NEARBY), sample)

    def _compile(self, params: PyTree, is_double: bool, deadline: float) -> tuple[bool, Callable]:
        with jax.enable_x64(is_double or jax.config.read("jax_enable_x64")):
            params, sample = (as_double(tree) if is_double else tree for tree in (params, self.sample))
            return is_double, compile_before(deadline, self._rank, params, sample)


def cost_point(problem: Problem, params: PyTree, data: Any) -> CostPoint:
    """The cost of a problem on data, after a forward pass."""
    terms = [term_on_batch(term, batch) for term, batch in batches_of(problem.terms, data)]
    return Cost(terms).at(params, Pass(1.0, jnp.array(0), has_sites=False))


def num_examples(problem: Problem, data: Any) -> int:
    return sum(batch.size for _, batch in batches_of(problem.terms, data))


def evenly_spaced(problem: Problem, count: int) -> Any:
    """`count` of the training examples, evenly spaced; with `Terms`, in proportion to their examples."""
    if count >= problem.num_examples:
        return problem.data

    def subset(data: Any) -> Any:
        if data[0] is None:
            return data
        size = len(jax.tree.leaves(data[0])[0])
        rows = np.linspace(0, size - 1, max(1, count * size // problem.num_examples)).astype(np.int32)
        return Problem.taken(data, rows)

    if None in problem.terms:
        return subset(problem.data)
    return {name: subset(data) for name, data in problem.data.items()}


def as_double(tree: PyTree) -> PyTree:
    """The tree with its floating-point arrays in double precision."""

    def convert(leaf: Any) -> jax.Array:
        array = np.asarray(leaf)
        return jnp.asarray(array.astype(np.float64) if np.issubdtype(array.dtype, np.floating) else array)

    return jax.tree.map(convert, tree)


def random_neighbour(params: PyTree, distance: float) -> PyTree:
    """Parameters in a random direction, at a distance relative to the norm of `params`."""
    flat, unflatten = _tree.flatten(params)
    noise = jax.random.normal(jax.random.key(0), flat.shape, flat.dtype)
    length = distance * jnp.maximum(jnp.linalg.norm(flat), 1e-3) / jnp.linalg.norm(noise)
    return unflatten(flat + length.astype(flat.dtype) * noise)
