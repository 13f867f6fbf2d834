"""The geometry of a problem at some parameters: the spectrum of its metric, and how good approximations to it are."""

import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._blocks.report import BlockReport
from natgrad._manifold.rank import Rank, rank
from natgrad._metric.base import AbstractMetric
from natgrad._optimiser.damping.constant import ConstantDamping
from natgrad._optimiser.evaluation import Evaluation, evaluate, loss_and_gradient, loss_at
from natgrad._optimiser.natural_gradient import NaturalGradient
from natgrad._optimiser.problem import Bound, batches_of
from natgrad._optimiser.step.constant import ConstantStep
from natgrad._optimiser.structure.exact import Exact, metric_of
from natgrad._problem import Problem
from natgrad._types import Scalar
from natgrad.comparison.methods import num_outputs, with_warnings
from natgrad.comparison.run import OutOfTime, compiled_by

# The largest matrix whose eigenvalues are computed.
LARGEST = 1200
# How far from a point, relative to its length, to look for a larger rank.
NEARBY = 1e-2
# Damping in units of the mean eigenvalue of the metric.
DAMPINGS = 10.0 ** np.arange(-1, 7)


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


class Approximation(NamedTuple):
    """A step by some structure, next to the exact one with the same damping: the angle between them in degrees and the
    ratio of their lengths, both in the damped metric. Scaled to the length that the quadratic model with the exact
    metric finds best, the decrease of the loss that this model predicts, next to the actual one."""

    point: str
    structure: str
    angle: float
    norm: float
    predicted_decrease: float
    actual_decrease: float
    note: str = ""


class Geometry(NamedTuple):
    points: list[SpectrumAt]
    structure: list[BlockReport]
    approximations: list[Approximation]
    damping: list[float]


class Examination:
    """Looks at a problem's geometry on a sample of its data. Compiled at the first look, as long as there is time."""

    def __init__(self, problem: Problem, structures: Mapping[str, Any], deadline: float = math.inf):
        self.problem, self.deadline = problem, deadline
        self.sample = sample_of(problem)
        self.structures = {"exact": Exact()} | {name: own for name, own in structures.items() if name != "exact"}
        self.points: list[SpectrumAt] = []
        self.approximations: list[Approximation] = []
        self.dampings: list[float] = []
        self.notes: dict[str, str] = {}
        self._steps: dict[str, Callable] = {}
        self._spectrum = jax.jit(lambda params, sample: rank(self._metric(params, sample)))
        self._descent = jax.jit(jax.grad(problem.loss))
        self._judge = jax.jit(self._judged)

    def look(self, name: str, step: int, params: PyTree) -> None:
        """Examine one more point."""
        point = self._spectrum_at(name, step, params)
        self.points.append(point)
        mean = sum(point.spectrum) / self.problem.num_params
        damping, exact = self._trusted(params, mean)
        self.dampings.append(damping)
        if exact is None:
            return
        steps = {"exact": exact, "gradient": self._gradient(params)}
        for structure in self.structures:
            found = exact if structure == "exact" else self._step(structure, params, damping)
            if found is not None:
                steps[structure] = found
        for structure, own in steps.items():
            angle, norm, predicted, actual = map(float, self._judge(params, own, exact, damping))
            # A gradient has no length of its own next to a step.
            length = math.nan if structure == "gradient" else norm
            note = self.notes.get(structure, "")
            self.approximations.append(Approximation(name, structure, angle, length, predicted, actual, note))

    def geometry(self) -> Geometry:
        return Geometry(self.points, self._structure_report(), self.approximations, self.dampings)

    def _trusted(self, params: PyTree, mean: float) -> tuple[float, PyTree | None]:
        """The least damping with which the exact step lowers the loss by half of what is predicted, and that step."""
        damping, exact = mean, None
        for factor in DAMPINGS if mean > 0 else ():
            damping = float(factor * mean)
            exact = self._step("exact", params, damping)
            if exact is None:
                break
            *_, predicted, actual = map(float, self._judge(params, exact, exact, damping))
            if actual > predicted / 2 > 0:
                break
        return damping, exact

    # Parts -----------------------------------------------------------------------------------------------

    def _bounds(self, sample: Any) -> list[Bound]:
        return [Bound(term, term.model, own) for term, own in batches_of(self.problem.terms, sample)]

    def _evaluation(self, params: PyTree, sample: Any) -> Evaluation:
        return evaluate(self._bounds(sample), params, 1.0, jnp.array(0), False)

    def _metric(self, params: PyTree, sample: Any) -> AbstractMetric:
        return metric_of(self._evaluation(params, sample).parts)

    def _ranks(self, params: PyTree) -> tuple[Rank, Rank]:
        """At the point and nearby, in double precision if the model can: in single, small eigenvalues are rounding."""
        try:
            with jax.enable_x64(True):
                double, sample = as_double(params), as_double(self.sample)
                return self._spectrum(double, sample), self._spectrum(moved(double, NEARBY), sample)
        except (TypeError, ValueError):
            return self._spectrum(params, self.sample), self._spectrum(moved(params, NEARBY), self.sample)

    def _spectrum_at(self, name: str, step: int, params: PyTree) -> SpectrumAt:
        here, nearby = self._ranks(params)
        count, size = int(here.rank), self.problem.num_params
        examples = sum(bound.batch.size for bound in self._bounds(self.sample))
        rows = here.spectrum.size
        return SpectrumAt(
            name,
            step,
            examples,
            count,
            size - count,
            rows < size,
            # Eigenvalues next to the cutoff come and go by rounding.
            int(nearby.rank) <= 1.02 * count,
            float(here.cutoff),
            np.maximum(np.asarray(here.spectrum, float), 0.0).tolist(),
        )

    def _step(self, name: str, params: PyTree, damping: float) -> PyTree | None:
        """A whole step with some structure, as the optimiser takes it."""
        if name in self.notes and name not in self._steps:
            return None
        try:
            if name not in self._steps:
                self._steps[name] = self._compiled_step(name, params)
        except (OutOfTime, ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            self.notes[name] = str(error)
            return None
        return self._steps[name](params, np.asarray(damping, float))

    def _compiled_step(self, name: str, params: PyTree) -> Callable:
        if time.perf_counter() > self.deadline:
            raise OutOfTime("there was no time left to compile it")
        problem, structure = self.problem, self.structures[name]

        def optimiser(damping: Any) -> NaturalGradient:
            whole = ConstantStep(1.0)
            return NaturalGradient(
                problem.model, problem.objective, structure, ConstantDamping(damping), whole, check=False
            )

        state, _ = with_warnings(lambda: optimiser(1.0).init(params, self.sample))

        def step(params, state, batch, damping):
            after, _, _ = optimiser(damping).step(params, state, batch)
            return jax.tree.map(jnp.subtract, after, params)

        call = compiled_by(self.deadline, jax.jit(step), params, state, self.sample, np.asarray(1.0, float))
        return lambda params, damping: call(params, state, self.sample, damping)

    def _gradient(self, params: PyTree) -> PyTree:
        """The step that a metric of one everywhere would make."""
        return jax.tree.map(jnp.negative, self._descent(params, self.sample))

    def _judged(self, params: PyTree, step: PyTree, exact: PyTree, damping: Scalar) -> tuple[Scalar, ...]:
        evaluation = self._evaluation(params, self.sample)
        _, unflatten = _tree.flatten(params)
        vectors = [_tree.flatten(tree)[0] for tree in (step, exact)]
        metric = evaluation.inner_products(vectors, unflatten)
        plain = jnp.stack([jnp.stack([u @ v for v in vectors]) for u in vectors])
        products = metric + damping * plain
        norms = jnp.sqrt(jnp.diagonal(products))
        cosine = products[0, 1] / (norms[0] * norms[1])
        loss, gradient = loss_and_gradient(self._bounds(self.sample), evaluation, params, 1)
        slope = -(gradient @ vectors[0])
        best = jnp.where(products[0, 0] > 0, slope / products[0, 0], 0.0)
        after = loss_at(
            self._bounds(self.sample), jax.tree.map(lambda w, v: w + best.astype(w.dtype) * v, params, step)
        )
        predicted = slope * best / 2
        return jnp.degrees(jnp.arccos(jnp.clip(cosine, -1, 1))), norms[0] / norms[1], predicted, loss - after

    def _structure_report(self) -> list[BlockReport]:
        """What K-FAC, or else another structure, made of every parameter."""
        for structure in self.structures.values():
            opt = NaturalGradient(self.problem.model, self.problem.objective, structure, check=False)
            try:
                state, _ = with_warnings(functools.partial(opt.init, self.problem.params, self.sample))
                return list(opt.report(state).rows)
            except (ValueError, TypeError, NotImplementedError):
                continue
        return []


def sample_of(problem: Problem) -> Any:
    """Few enough examples, evenly spaced, for the metric's eigenvalues to be computed."""
    if problem.num_params <= LARGEST:
        return problem.shown()
    kept = max(1, LARGEST // num_outputs(problem))
    if kept >= problem.num_examples:
        return problem.data

    def thinned(data: Any) -> Any:
        if data[0] is None:
            return data
        size = len(jax.tree.leaves(data[0])[0])
        rows = np.linspace(0, size - 1, max(1, kept * size // problem.num_examples)).astype(np.int32)
        return Problem.taken(data, rows)

    if None in problem.terms:
        return thinned(problem.data)
    return {name: thinned(own) for name, own in problem.data.items()}


def as_double(tree: PyTree) -> PyTree:
    wide = lambda leaf: leaf.astype(np.float64) if np.issubdtype(leaf.dtype, np.floating) else leaf
    return jax.tree.map(lambda leaf: jnp.asarray(wide(np.asarray(leaf))), tree)


def moved(params: PyTree, distance: float) -> PyTree:
    """Parameters a little away in a random direction."""
    flat, unflatten = _tree.flatten(params)
    noise = jax.random.normal(jax.random.key(0), flat.shape, flat.dtype)
    length = distance * jnp.maximum(jnp.linalg.norm(flat), 1e-3) / jnp.linalg.norm(noise)
    return unflatten(flat + length.astype(flat.dtype) * noise)
