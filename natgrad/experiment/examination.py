r"""Examine the geometry of a problem at some parameters: spectrum of the metric, and approximate against exact steps.

A structure is judged by its step $v = -(\hat G + \lambda I)^{-1} g$ next to the exact step
$e = -(G + \lambda I)^{-1} g$ with the same damping, both measured in the inner product of $G + \lambda I$."""

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
from natgrad._optimiser.natural_gradient import NaturalGradient
from natgrad._optimiser.step.fixed import ConstantStep
from natgrad._optimiser.structure.exact import Exact
from natgrad._problem import Problem
from natgrad._solve.cg import CG
from natgrad._solve.solve import DENSE
from natgrad._types import Scalar
from natgrad.experiment.methods import cost_of, num_outputs, with_warnings
from natgrad.experiment.run import OutOfTime, compile_before
from natgrad.experiment.spectrum import Spectrometer, SpectrumAt, cost_point, evenly_spaced, num_examples

# The fewest examples on which steps are compared.
FEWEST = 64
# Damping in units of the mean eigenvalue of the metric.
DAMPINGS = 10.0 ** np.arange(-1, 7)
# Limit of conjugate gradients, for exact steps where both parameters and outputs are too many for a dense matrix.
MAX_STEPS = 100


class Approximation(NamedTuple):
    """The step of a structure compared with the exact step for the same damping.

    `angle` (in degrees) and `norm` (a ratio) compare the two in the damped metric. The decreases of the loss are for
    the step scaled to the length that minimises the quadratic model with the exact metric."""

    point: str
    structure: str
    angle: float
    norm: float
    predicted_decrease: float
    actual_decrease: float
    note: str = ""


class GeometryReport(NamedTuple):
    """Spectrum, damping and approximations at each point that was examined, and the block of every parameter."""

    points: list[SpectrumAt]
    damping: list[float]
    approximations: list[Approximation]
    structure: list[BlockReport]


class Judgement(NamedTuple):
    """A step next to the exact one, as traced numbers: the fields of `Approximation` that are computed."""

    angle: Scalar
    norm: Scalar
    predicted_decrease: Scalar
    actual_decrease: Scalar


class Examination:
    """Examines the geometry of a problem, point by point, on a sample of its data.

    Programs are compiled at the first look. Nothing is compiled after the deadline of a look."""

    def __init__(self, problem: Problem, structures: Mapping[str, Any]):
        self.problem, self._spectrometer = problem, Spectrometer(problem)
        sample = self._spectrometer.sample
        is_enough = num_examples(problem, sample) >= FEWEST
        self.batch = sample if is_enough else evenly_spaced(problem, FEWEST)
        rows = num_examples(problem, self.batch) * num_outputs(problem)
        is_small = min(rows, problem.num_params) <= DENSE
        # Exact steps are the reference, and always computed.
        others = {name: structure for name, structure in structures.items() if name != "exact"}
        self.structures = {"exact": Exact() if is_small else Exact(solver=CG(rtol=1e-3, max_steps=MAX_STEPS))} | others
        self.notes = {} if is_small else {"exact": f"At most {MAX_STEPS} steps of conjugate gradients."}
        self._report = GeometryReport([], [], [], [])
        self._steps: dict[str, Callable] = {}
        self._failures: dict[str, str] = {}
        self._descent = jax.jit(jax.grad(problem.loss))
        self._judge = jax.jit(self._judgement)

    def look(self, name: str, step: int, params: PyTree, deadline: float = math.inf) -> None:
        """Examine one more point. Parts that are not finished at the deadline are left out of the report."""
        try:
            point = self._spectrometer.at(name, step, params, deadline)
        except OutOfTime:
            return
        damping, exact = self._choose_damping(params, sum(point.spectrum) / self.problem.num_params, deadline)
        approximations = [] if exact is None else self._compare_steps(name, params, exact, damping, deadline)
        nan = math.nan
        approximations += [
            Approximation(name, structure, nan, nan, nan, nan, reason) for structure, reason in self._failures.items()
        ]
        # All at once, so that Ctrl-C leaves either the whole point in the report or nothing of it.
        report = self._report
        self._report = GeometryReport(
            [*report.points, point],
            [*report.damping, damping],
            [*report.approximations, *approximations],
            report.structure,
        )

    def _compare_steps(
        self, name: str, params: PyTree, exact: PyTree, damping: float, deadline: float
    ) -> list[Approximation]:
        """Compare the gradient and the step of each structure with the exact step."""
        steps = {"exact": exact, "gradient": jax.tree.map(jnp.negative, self._descent(params, self.batch))}
        for structure in self.structures:
            step = exact if structure == "exact" else self._step(structure, params, damping, deadline)
            if step is not None:
                steps[structure] = step
        approximations = []
        for structure, step in steps.items():
            angle, norm, predicted, actual = map(float, self._judge(params, step, exact, damping, self.batch))
            # The length of a gradient is in other units than the length of a step.
            length = math.nan if structure == "gradient" else norm
            note = self.notes.get(structure, "")
            approximations.append(Approximation(name, structure, angle, length, predicted, actual, note))
        return approximations

    def geometry(self) -> GeometryReport:
        """The report on all points so far."""
        return self._report._replace(structure=self._structure_report)

    def _choose_damping(self, params: PyTree, mean_eigenvalue: float, deadline: float) -> tuple[float, PyTree | None]:
        """The least damping for which the exact step lowers the loss by half of its prediction, and that step."""
        damping, exact = mean_eigenvalue, None
        for factor in DAMPINGS if mean_eigenvalue > 0 else ():
            if exact is not None and time.perf_counter() > deadline:
                break
            damping = float(factor * mean_eigenvalue)
            exact = self._step("exact", params, damping, deadline)
            if exact is None:
                break
            judgement = self._judge(params, exact, exact, damping, self.batch)
            if float(judgement.actual_decrease) > float(judgement.predicted_decrease) / 2 > 0:
                break
        return damping, exact

    def _step(self, name: str, params: PyTree, damping: float, deadline: float) -> PyTree | None:
        """The step of length one that the optimiser takes with a structure, or `None` if it cannot be compiled."""
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
            raise OutOfTime("There was no time left to compile it.")
        cost, damping = cost_of(self.problem, check=False), ConstantDamping(1.0)
        opt = NaturalGradient(cost, structure=structure, damping=damping, step=ConstantStep(1.0))
        batch = self.batch
        state, _ = with_warnings(lambda: opt.init(params, batch))

        def step(params, state, batch, damping):
            after, _, _ = eqx.tree_at(lambda opt: opt.damping.value, opt, damping).step(params, state, batch)
            return jax.tree.map(jnp.subtract, after, params)

        call = compile_before(deadline, jax.jit(step), params, state, batch, np.asarray(1.0, float))

        def step_at(params: PyTree, damping: Any) -> PyTree:
            return call(params, state, batch, damping)

        return step_at

    def _judgement(self, params: PyTree, step: PyTree, exact: PyTree, damping: Scalar, batch: Any) -> Judgement:
        r"""Compare a step $v$ with the exact step in the inner product of $G + \lambda I$.

        Along $v$ the quadratic model of the loss is lowest at the length $-g^\top v / v^\top (G + \lambda I) v$."""
        point = cost_point(self.problem, params, batch)
        _, unflatten = _tree.flatten(params)
        vectors = [_tree.flatten(tree)[0] for tree in (step, exact)]
        plain = jnp.stack([jnp.stack([u @ v for v in vectors]) for u in vectors])
        products = point.inner_products(vectors, unflatten) + damping * plain
        norms = jnp.sqrt(jnp.diagonal(products))
        cosine = products[0, 1] / (norms[0] * norms[1])
        loss, gradient = point.value_and_gradient()
        slope = -(gradient @ vectors[0])
        # A step of zero has no best length.
        length = jnp.where(products[0, 0] > 0, slope / products[0, 0], 0.0)
        after = self.problem.loss(jax.tree.map(lambda w, v: w + length.astype(w.dtype) * v, params, step), batch)
        # Rounding puts the cosine of equal steps above one, where the angle would be NaN.
        angle = jnp.degrees(jnp.arccos(jnp.clip(cosine, -1, 1)))
        return Judgement(angle, norms[0] / norms[1], slope * length / 2, loss - after)

    @functools.cached_property
    def _structure_report(self) -> list[BlockReport]:
        """The block of every parameter, from the first structure that reports blocks."""
        for structure in self.structures.values():
            opt = NaturalGradient(cost_of(self.problem, check=False), structure=structure)
            try:
                state, _ = with_warnings(functools.partial(opt.init, self.problem.params, self.batch))
                return list(opt.report(state).rows)
            except (ValueError, TypeError, NotImplementedError):
                continue
        return []
