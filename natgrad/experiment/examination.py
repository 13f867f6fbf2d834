"""The geometry of a problem at some parameters: the spectrum of its metric, and how good approximations to it are."""

import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._block.structure_report import BlockReport
from natgrad._optimiser.damping import ConstantDamping
from natgrad._optimiser.evaluation import loss_and_gradient
from natgrad._optimiser.natural_gradient import NaturalGradient
from natgrad._optimiser.step.fixed import ConstantStep
from natgrad._optimiser.structure.exact import Exact
from natgrad._problem import Problem
from natgrad._solve.cg import CG
from natgrad._solve.solve import DENSE
from natgrad._types import Scalar
from natgrad.experiment.methods import cost_of, num_outputs, with_warnings
from natgrad.experiment.run import OutOfTime, compiled_by
from natgrad.experiment.spectrum import Spectrometer, SpectrumAt, bounds, evaluation, num_examples, thinned

# The fewest examples on which steps are compared.
FEWEST = 64
# Damping in units of the mean eigenvalue of the metric.
DAMPINGS = 10.0 ** np.arange(-1, 7)
# For exact steps where neither parameters nor outputs are few.
TRUNCATED = CG(rtol=1e-3, max_steps=100)


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


class GeometryReport(NamedTuple):
    """What was found at some points: spectra, and steps and how they were damped; and the block of every parameter."""

    points: list[SpectrumAt]
    damping: list[float]
    approximations: list[Approximation]
    structure: list[BlockReport]


Found = tuple[list[SpectrumAt], list[float], list[Approximation]]


class Examination:
    """Looks at a problem's geometry on a sample of its data. Compiled at the first look, as long as there is time."""

    def __init__(self, problem: Problem, structures: Mapping[str, Any]):
        self.problem, self._spectrometer = problem, Spectrometer(problem)
        sample = self._spectrometer.sample
        is_enough = num_examples(problem, sample) >= FEWEST
        self.batch = sample if is_enough else thinned(problem, FEWEST)
        rows = num_examples(problem, self.batch) * num_outputs(problem)
        is_small = min(rows, problem.num_params) <= DENSE
        others = {name: own for name, own in structures.items() if name != "exact"}
        self.structures = {"exact": Exact() if is_small else Exact(solver=TRUNCATED)} | others
        self.notes = {} if is_small else {"exact": f"By at most {TRUNCATED.max_steps} conjugate gradients."}
        self._found: Found = ([], [], [])
        self._steps: dict[str, Callable] = {}
        self._failures: dict[str, str] = {}
        self._descent = jax.jit(jax.grad(problem.loss))
        self._judge = jax.jit(self._judged)

    def look(self, name: str, step: int, params: PyTree, deadline: float = math.inf) -> None:
        """Examine one more point. What is not there at the deadline is left out."""
        try:
            point = self._spectrometer.at(name, step, params, deadline)
        except OutOfTime:
            return
        damping, exact = self._trusted(params, sum(point.spectrum) / self.problem.num_params, deadline)
        found = [] if exact is None else self._compared(name, params, exact, damping, deadline)
        nan = math.nan
        found += [Approximation(name, own, nan, nan, nan, nan, reason) for own, reason in self._failures.items()]
        # All at once, for an interruption to leave all of it or nothing.
        points, dampings, approximations = self._found
        self._found = [*points, point], [*dampings, damping], [*approximations, *found]

    def _compared(
        self, name: str, params: PyTree, exact: PyTree, damping: float, deadline: float
    ) -> list[Approximation]:
        steps = {"exact": exact, "gradient": jax.tree.map(jnp.negative, self._descent(params, self.batch))}
        for structure in self.structures:
            found = exact if structure == "exact" else self._step(structure, params, damping, deadline)
            if found is not None:
                steps[structure] = found
        compared = []
        for structure, own in steps.items():
            angle, norm, predicted, actual = map(float, self._judge(params, own, exact, damping, self.batch))
            # A gradient has no length of its own next to a step.
            length = math.nan if structure == "gradient" else norm
            note = self.notes.get(structure, "")
            compared.append(Approximation(name, structure, angle, length, predicted, actual, note))
        return compared

    def geometry(self) -> GeometryReport:
        return GeometryReport(*self._found, self._structure_report)

    def _trusted(self, params: PyTree, mean: float, deadline: float) -> tuple[float, PyTree | None]:
        """The least damping with which the exact step lowers the loss by half of what is predicted, and that step."""
        damping, exact = mean, None
        for factor in DAMPINGS if mean > 0 else ():
            if exact is not None and time.perf_counter() > deadline:
                break
            damping = float(factor * mean)
            exact = self._step("exact", params, damping, deadline)
            if exact is None:
                break
            *_, predicted, actual = map(float, self._judge(params, exact, exact, damping, self.batch))
            if actual > predicted / 2 > 0:
                break
        return damping, exact

    def _step(self, name: str, params: PyTree, damping: float, deadline: float) -> PyTree | None:
        """A whole step with some structure, as the optimiser takes it; or nothing, if it cannot be compiled."""
        if name in self._failures:
            return None
        try:
            if name not in self._steps:
                self._steps[name] = self._compiled_step(self.structures[name], params, deadline)
        except (OutOfTime, ValueError, TypeError, RuntimeError) as error:
            self._failures[name] = str(error)
            return None
        return self._steps[name](params, np.asarray(damping, float))

    def _compiled_step(self, structure: Any, params: PyTree, deadline: float) -> Callable:
        if time.perf_counter() > deadline:
            raise OutOfTime("there was no time left to compile it")
        cost, damping = cost_of(self.problem, check=False), ConstantDamping(1.0)
        opt = NaturalGradient(cost, structure=structure, damping=damping, step=ConstantStep(1.0))
        state, _ = with_warnings(lambda: opt.init(params, self.batch))

        def step(params, state, batch, damping):
            after, _, _ = eqx.tree_at(lambda opt: opt.damping.value, opt, damping).step(params, state, batch)
            return jax.tree.map(jnp.subtract, after, params)

        call = compiled_by(deadline, jax.jit(step), params, state, self.batch, np.asarray(1.0, float))
        return lambda params, damping: call(params, state, self.batch, damping)

    def _judged(self, params: PyTree, step: PyTree, exact: PyTree, damping: Scalar, batch: Any) -> tuple[Scalar, ...]:
        at = evaluation(self.problem, params, batch)
        _, unflatten = _tree.flatten(params)
        vectors = [_tree.flatten(tree)[0] for tree in (step, exact)]
        plain = jnp.stack([jnp.stack([u @ v for v in vectors]) for u in vectors])
        products = at.inner_products(vectors, unflatten) + damping * plain
        norms = jnp.sqrt(jnp.diagonal(products))
        cosine = products[0, 1] / (norms[0] * norms[1])
        loss, gradient = loss_and_gradient(bounds(self.problem, batch), at, params, 1)
        slope = -(gradient @ vectors[0])
        best = jnp.where(products[0, 0] > 0, slope / products[0, 0], 0.0)
        after = self.problem.loss(jax.tree.map(lambda w, v: w + best.astype(w.dtype) * v, params, step), batch)
        angle = jnp.degrees(jnp.arccos(jnp.clip(cosine, -1, 1)))
        return angle, norms[0] / norms[1], slope * best / 2, loss - after

    @functools.cached_property
    def _structure_report(self) -> list[BlockReport]:
        """What K-FAC, or else another structure, made of every parameter."""
        for structure in self.structures.values():
            opt = NaturalGradient(cost_of(self.problem, check=False), structure=structure)
            try:
                state, _ = with_warnings(functools.partial(opt.init, self.problem.params, self.batch))
                return list(opt.report(state).rows)
            except (ValueError, TypeError, NotImplementedError):
                continue
        return []
