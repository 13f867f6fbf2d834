"""A metric in the space of samples: the tangent kernel."""

from collections.abc import Callable

import equinox as eqx
from jaxtyping import Array, Float, PyTree

from natgrad import _tree
from natgrad._check import caller, public, require
from natgrad._geometry.base import AbstractGeometry
from natgrad._metric.samples import forward_in
from natgrad._model import check_params, finite, without_aux
from natgrad._point.columns import check_num_samples, output_columns
from natgrad._point.probe import check_model
from natgrad._types import Key


@public
def gram(
    model: Callable,
    geometry: AbstractGeometry,
    params: PyTree,
    x: PyTree = None,
    *,
    key: Key | None = None,
    num_samples: int = 1,
    in_axes: PyTree = 0,
    has_aux: bool = False,
    check: bool = True,
    budget: int = 2**26,
) -> Float[Array, "C N C N"]:
    r"""The tangent kernel in a geometry: $\langle J_i^\top s_{ic}, J_j^\top s_{je}\rangle$ for the columns $s_{ic}$ of
    `geometry.factor` at every output, the metric in the space of samples without its $\frac1N$.

    Computed from the factors of the gradients, without a row of a Jacobian. With a `key`, columns are `num_samples`
    draws of `geometry.sample`, divided by the root of their number, so that its eigenvalues estimate those of the
    metric all the same. `in_axes`, `has_aux`, `check` and `budget` are as for
    `per_example`."""
    check_num_samples(num_samples)
    check_params(params)
    model = without_aux(model, has_aux)
    is_left = check and check_model(model, params, x, in_axes)
    kernel = _gram(_tree.as_callable(model), geometry, params, x, key, num_samples, in_axes, budget, is_left)
    return require(kernel, [finite(kernel)], f"{caller()}: every product", traced=False)


@eqx.filter_jit
def _gram(model, geometry, params, x, key, num_samples, in_axes, budget, check) -> Float[Array, "C N C N"]:
    forward = forward_in(geometry, model, params, x, in_axes, budget, check)
    return forward.pull(output_columns(geometry, forward.z, key, num_samples), is_stacked=True).gram()
