"""Metrics that a model induces on its parameters, and how far apart two parameter vectors are as functions."""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from natgrad import _tree
from natgrad._check import caller, public
from natgrad._geometry.base import AbstractGeometry
from natgrad._geometry.bregman import LossGeometry
from natgrad._metric import samples
from natgrad._metric.base import MAX_ROW_ENTRIES, AbstractMetric
from natgrad._metric.output import AbstractOutputMetric, CentredOutputMetric, ColumnsOutputMetric, ExactOutputMetric
from natgrad._model import check_outputs, check_params, check_structure, without_aux
from natgrad._point.batch import as_examples, refuse_mask, refuse_weights
from natgrad._point.evaluate import AnyPoint, PendingPoint, check_outputs_in, check_values, geometry_of, given_point
from natgrad._point.point import OutputMap, Point, check_num_samples
from natgrad._point.probe import check_independent, may_couple
from natgrad._types import Key, Output, Scalar

# Columns an example up to which a matrix is formed from rows.
FEW_COLUMNS = 8


class PullbackMetric(AbstractMetric):
    r"""The metric that a map $f$ induces on its parameters, $G = \frac1N\sum_i J_i^\top G_z(z_i) J_i$.

    Never forms $J$. The model is differentiated once; each product then costs one tangent and one cotangent pass, about
    as much as a gradient. Singular whenever the model has redundant parameters, so pair it with damping or with a
    solver that accepts a rank-deficient operator."""

    point: Point
    output: AbstractOutputMetric
    # Whether it was tested that the model treats examples independently.
    is_checked: bool = eqx.field(default=False, static=True)

    def _mv(self, v):
        cotangents = self.output.mv(self.point, self.point.push(v))
        return self.point.pull(_tree.scale(1 / self.num_examples, cotangents))

    @property
    def root_size(self):
        return self.output.root_size(self.point)

    def root_mv(self, v):
        rows = self.output.root_mv(self.point, self.point.push(v))
        return rows.astype(self._dtype) / math.sqrt(self.num_examples)

    def root_transpose_mv(self, u):
        return self.point.pull(self.output.root_transpose_mv(self.point, u / math.sqrt(self.num_examples)))

    def _columns(self) -> ColumnsOutputMetric | None:
        """Columns for single examples; `None` where rows are no statistics of single examples, because the metric of
        the outputs mixes them, or because the model may."""
        return self.output.as_columns(self.point) if self.is_checked or not may_couple(self.point) else None

    @property
    def _with_sites(self) -> AnyPoint:
        """Where statistics of single examples are computed: with a forward pass of their own, unless the point has
        recorded what they need."""
        return self.point if self.point.sites is not None else PendingPoint(self.point.map, self.point.params)

    def root_gram(self):
        columns = self._columns()
        if columns is None:
            return AbstractMetric.root_gram(self)
        return samples.gram(self._with_sites, columns).astype(self._dtype) / self.num_examples

    def diagonal(self):
        columns = self._columns()
        if columns is None or self.root_size >= self.in_size():
            return AbstractMetric.diagonal(self)
        squares = _tree.scale(1 / self.num_examples, samples.squared_sum(self._with_sites, columns))
        return _tree.cast_like(squares, self.in_structure())

    def as_matrix(self):
        # One backward pass gives a row of every example, so that few columns cost less than products with all
        # parameters, however many examples there are.
        are_few = self.root_size <= FEW_COLUMNS * self.num_examples
        if not are_few or self.root_size * self.in_size() > MAX_ROW_ENTRIES or self._columns() is None:
            return AbstractMetric.as_matrix(self)
        rows = self.root_rows()
        return rows.T @ rows

    def root_rows(self):
        columns = self._columns()
        if columns is None:
            return AbstractMetric.root_rows(self)
        return samples.rows(self._with_sites, columns).astype(self._dtype) / math.sqrt(self.num_examples)

    def _sample(self, key):
        cotangents = self.output.sample(self.point, key)
        return self.point.pull(_tree.scale(1 / math.sqrt(self.num_examples), cotangents))

    def root_coordinates(self, cotangents: Output) -> Float[Array, " rows"]:
        r"""$a$ with $R^\top a = \frac1N\sum_i J_i^\top r_i$ for cotangents $r_i$ in the range of the output metric."""
        described = [jax.tree.map(jnp.shape, tree) for tree in (self.point.z, cotangents)]
        if described[0] != described[1]:
            raise ValueError(
                f"`cotangents` must have the shapes of the outputs, {described[0]}, but have {described[1]}."
            )
        return self.output.coordinates(self.point, cotangents).astype(self._dtype) / math.sqrt(self.num_examples)

    def in_structure(self):
        return self.point.structure

    @property
    def num_examples(self) -> int:
        return self.point.num_examples


@public
def pullback(
    model: Callable | Point,
    geometry: AbstractGeometry | None = None,
    params: PyTree = None,
    x: PyTree = None,
    *,
    key: Key | None = None,
    num_samples: int = 1,
    centred: bool = False,
    has_aux: bool = False,
    check: bool = True,
) -> PullbackMetric:
    r"""The metric $\frac1N\sum_i J_i^\top G_z(z_i) J_i$ of `model(params, x)` at `params`, matrix-free.

    **Arguments:**

    - `model`: `model(params, x) -> z`, with examples along the leading axis of `x` and `z`. With `x=None` it is
      `model(params)`, one output without that axis.
    - `geometry`: of one example's output. With `Fisher(family)` this is the Fisher metric.
    - `key`: replaces $G_z$ by the average of $s s^\top$ over `num_samples` draws of `geometry.sample` an example, an
      unbiased estimate (the sampled Fisher). Without it the expectation is exact.
    - `centred`: subtracts the mean over examples from the Jacobian, for outputs that are known only up to a constant,
      such as the log-amplitude of an unnormalised model.
    - `has_aux`: whether the model returns `(z, aux)`; `aux` is then left out.
    - `check`: whether to test, on concrete data, that the model treats examples independently. The metric of one that
      does not is right all the same, but matrices, diagonals and sample-space solves take longer.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0], [2.0]])
    metric = ng.pullback(lambda w, x: x @ w, ng.Fisher(ng.Bernoulli()), jnp.zeros(1), x)
    assert jnp.allclose(metric.as_matrix(), 0.25 * 2.5)  # p (1 - p) times the mean of x squared
    ```
    """
    check_num_samples(num_samples)
    if isinstance(model, Point):
        point = given_point(model, geometry, params, x, has_aux=has_aux)
        geometry_of(point)
        is_checked = not may_couple(point)
        # The metric of a model that may couple examples needs the Jacobian of the batch as it is.
        point = point if is_checked else point.map.at(point.params)
    else:
        point, is_checked = _plain_point(model, geometry, params, x, has_aux=has_aux, check=check)
        geometry_of(point)
    refuse_mask(point.map.batch)
    if centred:
        refuse_weights(point.map.batch, "`centred=True`")
    output: AbstractOutputMetric = ExactOutputMetric()
    if key is not None:
        output = ColumnsOutputMetric(point.columns(key, num_samples))
    return PullbackMetric(point, CentredOutputMetric(output) if centred else output, is_checked)


def _plain_point(
    model: Callable,
    geometry: AbstractGeometry | LossGeometry | None,
    params: PyTree,
    x: PyTree,
    y: PyTree = None,
    *,
    has_aux: bool,
    check: bool,
) -> tuple[Point, bool]:
    """A point without sites, and whether it was tested that the model treats examples independently."""
    check_params(params)
    batch = as_examples(x)
    batch = batch if y is None else batch.with_targets(y)
    refuse_mask(batch)
    point = OutputMap(without_aux(model, has_aux), batch, geometry).at(params)
    check_outputs(point.z, batch.size)
    check_values(point)
    return point, check and check_independent(point)


@public
def gauss_newton(
    model: Callable,
    loss: Callable,
    params: PyTree,
    x: PyTree,
    y: PyTree = None,
    *,
    has_aux: bool = False,
    check: bool = True,
) -> PullbackMetric:
    r"""The generalised Gauss-Newton matrix of the mean of `loss(z, y)`.

    $\frac1N\sum_i J_i^\top\,\nabla_z^2\ell(z_i, y_i)\,J_i$, where `loss` is written for one example and must be convex
    in `z`.

    The pullback metric of the geometry whose Hessian the loss has; for an exponential family in natural parameters the
    Fisher metric, for half the squared error the classical Gauss-Newton matrix. `has_aux` and `check` are as for
    `pullback`.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    x, y = jnp.array([[1.0], [2.0]]), jnp.zeros(2)
    metric = ng.gauss_newton(lambda w, x: x @ w, lambda z, y: (z - y) ** 2 / 2, jnp.zeros(1), x, y)
    assert jnp.allclose(metric.as_matrix(), 2.5)  # the mean of x squared
    ```
    """
    point, is_checked = _plain_point(model, LossGeometry(loss), params, x, y, has_aux=has_aux, check=check)
    return PullbackMetric(point, ExactOutputMetric(), is_checked)


@public
def empirical_fisher(
    model: Callable,
    loss: Callable,
    params: PyTree,
    x: PyTree,
    y: PyTree = None,
    *,
    has_aux: bool = False,
    check: bool = True,
) -> PullbackMetric:
    r"""The second moment $\frac1N\sum_i g_i g_i^\top$ of the gradients $g_i$ of the examples' losses.

    !!! warning "This is not the Fisher metric"
        The Fisher metric averages over targets drawn from the model; this one uses the targets of the data. The two
        agree only where the model fits the distribution of the data, and far from there the directions they give differ
        widely.
        Use `pullback(model, Fisher(family), ...)` for the Fisher metric, `key=...` if it should cost no more than
        this.

    `loss(z, y)` is written for one example; `has_aux` and `check` are as for `pullback`.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    x, y = jnp.array([[1.0], [2.0]]), jnp.array([1.0, 0.0])
    metric = ng.empirical_fisher(lambda w, x: x @ w, lambda z, y: (z - y) ** 2 / 2, jnp.zeros(1), x, y)
    assert jnp.allclose(metric.as_matrix(), 0.5)  # gradients -1 and 0
    ```
    """
    point, is_checked = _plain_point(model, None, params, x, y, has_aux=has_aux, check=check)
    weights = point.map.batch.weights
    if weights is not None and weights.ndim > 1:
        refuse_weights(point.map.batch, "The gradient of a loss over positions")
    return PullbackMetric(point, ColumnsOutputMetric(_gradients(loss, point)), is_checked)


@public
def gradient_covariance(
    model: Callable,
    loss: Callable,
    params: PyTree,
    x: PyTree,
    y: PyTree = None,
    *,
    has_aux: bool = False,
    check: bool = True,
) -> PullbackMetric:
    r"""The covariance $\frac1N\sum_i (g_i - \bar g)(g_i - \bar g)^\top$ of the gradients of the examples' losses.

    With the divisor $N$, so that `empirical_fisher` is this covariance plus $\bar g\,\bar g^\top$. Arguments are as for
    `empirical_fisher`.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    x, y = jnp.array([[1.0], [1.0]]), jnp.array([1.0, 3.0])
    metric = ng.gradient_covariance(lambda w, x: x @ w, lambda z, y: (z - y) ** 2 / 2, jnp.zeros(1), x, y)
    assert jnp.allclose(metric.as_matrix(), 1.0)  # gradients -1 and -3
    ```
    """
    point, is_checked = _plain_point(model, None, params, x, y, has_aux=has_aux, check=check)
    refuse_weights(point.map.batch, "The mean gradient")
    return PullbackMetric(point, ColumnsOutputMetric(_gradients(loss, point), is_centred=True), is_checked)


def _gradients(loss: Callable, point: Point) -> Output:
    """The derivatives of the losses of examples by their outputs, as the only column."""
    gradients = point.weighed(jax.vmap(jax.grad(loss))(point.z, point.map.batch.y))
    return jax.tree.map(lambda s: s[None], gradients)


@public
def function_distance(
    model: Callable,
    geometry: AbstractGeometry,
    params: PyTree,
    other: PyTree,
    x: PyTree = None,
    *,
    has_aux: bool = False,
) -> Scalar:
    r"""How far apart two parameter vectors are as functions.

    The mean over the batch of $\rho(f(w', x_i), f(w, x_i))$, with $w$ = `params` and $w'$ = `other`.

    Its Hessian in `other` at `other = params` is the pullback metric. With `has_aux` the model returns `(z, aux)`, and
    `aux` is left out.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0], [2.0]])
    distance = ng.function_distance(lambda w, x: x @ w, ng.Euclidean(), jnp.zeros(1), jnp.ones(1), x)
    assert jnp.allclose(distance, (1 + 4) / 2 / 2)
    ```
    """
    check_params(params)
    check_structure(params, other, f"{caller()}: `other`")
    batch = as_examples(x)
    refuse_mask(batch)
    function = OutputMap(without_aux(model, has_aux), batch)
    check_outputs(jax.eval_shape(lambda params: function(params), params), batch.size)
    if batch.weights is not None and batch.weights.ndim > 1:
        raise ValueError(
            f"{caller()} needs one weight for each example, but got weights of shape {batch.weights.shape}. Leave out "
            "the weights of positions."
        )
    ends = function(other), function(params)
    for z in ends:
        check_outputs_in(geometry, z, batch)
    return batch.mean(jax.vmap(geometry.dissimilarity)(*ends))
