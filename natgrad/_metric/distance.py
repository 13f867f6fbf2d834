from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from natgrad._check import caller, public
from natgrad._geometry.base import AbstractGeometry
from natgrad._model import check_outputs, check_params, check_structure, num_examples, of_params, without_aux
from natgrad._types import Scalar


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
    r"""How far apart two parameter vectors are as functions: the mean over the batch of
    $\rho(f(w', x_i), f(w, x_i))$, with $w$ = `params` and $w'$ = `other`.

    Its Hessian in `other` at `other = params` is the pullback metric. With `has_aux` the model returns `(z, aux)`, and
    `aux` is left out."""
    check_params(params)
    check_structure(params, other, f"{caller()}: `other`")
    function = of_params(without_aux(model, has_aux), x)
    check_outputs(jax.eval_shape(function, params), num_examples(x))
    return jnp.mean(jax.vmap(geometry.dissimilarity)(function(other), function(params)))
