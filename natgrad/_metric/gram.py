"""A metric in the space of samples: the tangent kernel."""

from collections.abc import Callable

from jaxtyping import Array, Float, PyTree

from natgrad._check import caller, public, require
from natgrad._compile import compiled
from natgrad._geometry.base import AbstractGeometry
from natgrad._model import finite
from natgrad._point.batch import refuse_mask
from natgrad._point.evaluate import AnyPoint, as_point, check_outputs_in, evaluated, geometry_of
from natgrad._point.point import Point, check_num_samples
from natgrad._types import Key, Output


@public
def gram(
    model: Callable | Point,
    geometry: AbstractGeometry | None = None,
    params: PyTree = None,
    x: PyTree = None,
    *,
    key: Key | None = None,
    num_samples: int = 1,
    has_aux: bool = False,
) -> Float[Array, "C N C N"]:
    r"""The tangent kernel in a geometry: inner products of the gradients of all examples and output columns.

    The entries are $\langle J_i^\top s_{ic}, J_j^\top s_{je}\rangle$ for the columns $s_{ic}$ of `geometry.factor` at
    every output: the metric in the space of samples without its $\frac1N$.

    Computed from the factors of the gradients, without a row of a Jacobian. With a `key`, columns are `num_samples`
    draws of `geometry.sample`, divided by the root of their number, so that its eigenvalues estimate those of the
    metric all the same. `has_aux` is as for `per_example`, and `model` may be a `Point`, from `evaluate`, in place of
    `model`, `geometry`, `params` and `x`.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0, 0.0], [1.0, 2.0]])
    kernel = ng.gram(lambda w, x: x @ w, ng.Euclidean(), jnp.zeros(2), x)
    assert jnp.allclose(kernel.reshape(2, 2), x @ x.T)
    ```
    """
    check_num_samples(num_samples)
    at = as_point(model, geometry, params, x, has_aux=has_aux)
    refuse_mask(at.map.batch)
    geometry = geometry_of(at)
    kernel, z = _gram(at, key, num_samples)
    check_outputs_in(geometry, z, at.map.batch)
    return require(kernel, [finite(kernel)], f"{caller()}: every product", traced=False)


@compiled
def _gram(at: AnyPoint, key: Key | None, num_samples: int) -> tuple[Float[Array, "C N C N"], Output]:
    point = evaluated(at)
    columns = point.refuse_coupled(point.columns(key, num_samples))
    return point.per_example(columns, is_stacked=True).gram(), point.z
