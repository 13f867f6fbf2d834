"""Where theory says that a Kronecker product is the metric itself, and what other implementations compute."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import as_matrix, relative_errors
from jax import lax
from models import normal
from zoo import ZOO, affine, along

import natgrad as ng
from natgrad._block.kronecker import KroneckerEstimator

DATA = Path(__file__).parent / "data" / "curvlinops"
SQUARES = ng.Euclidean()
SOFTMAX = ng.Fisher(ng.Categorical())


def exact(model, geometry, params, x):
    return jax.jit(lambda p: ng.pullback(model, geometry, p, x).as_matrix())(params)


def kfac(model, geometry, params, x, **options):
    """Compiled whole."""
    return jax.jit(lambda p: ng.kfac(model, geometry, p, x, **options))(params)


# Deep linear networks with squared error: every block, whatever the number of examples.


@pytest.mark.sample(1)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_deep_linear_networks(has_bias, sharing):
    sizes = [("z", 5, 7), ("a", 7, 3), ("m", 3, 4)]
    params = {name: {"w": normal(k, d, o)} for k, (name, d, o) in enumerate(sizes)}
    if has_bias:
        params = {name: {**own, "b": normal(9, own["w"].shape[1])} for name, own in params.items()}

    def model(params, x):
        for name, _, _ in sizes:
            own = params[name]
            x = affine(x, own["w"], own["b"]) if has_bias else x @ own["w"]
        return x

    x = normal(7, 6, 5)
    K = kfac(model, SQUARES, params, x, blocks=ng.BlockRules(sharing=sharing, strict=True))
    assert max(relative_errors(K, exact(model, SQUARES, params, x))) < 1e-10


def test_deep_linear_network_in_single_precision():
    params = [normal(1, 5, 7).astype(np.float32), normal(2, 7, 3).astype(np.float32)]
    model = lambda params, x: x @ params[0] @ params[1]
    x = normal(3, 6, 5).astype(np.float32)
    K = kfac(model, SQUARES, params, x)
    assert as_matrix(K).dtype == jnp.float32
    assert max(relative_errors(K, exact(model, SQUARES, params, x))) < 1e-5


# Any network, one example, exact backward passes.


def tanh_network(params, x):
    hidden = jnp.tanh(affine(x, **params[0]))
    return affine(jax.nn.gelu(affine(hidden, **params[1])), **params[2])


@pytest.mark.sample(1)
@pytest.mark.parametrize("geometry", [SOFTMAX, ng.Fisher(ng.Bernoulli()), SQUARES])
def test_one_example(geometry):
    case = ZOO["mlp"]()
    x = case.x[:1]
    K = kfac(tanh_network, geometry, case.params, x, blocks=ng.BlockRules(strict=True))
    assert max(relative_errors(K, exact(tanh_network, geometry, case.params, x))) < 1e-10


def test_several_examples_are_not_exact():
    """The test above would be empty if it held for any number of examples."""
    case = ZOO["mlp"]()
    K = kfac(tanh_network, SOFTMAX, case.params, case.x)
    assert max(relative_errors(K, exact(tanh_network, SOFTMAX, case.params, case.x))) > 1e-2


@pytest.mark.slow
def test_derivatives_that_a_user_defines_are_used():
    """`custom_vjp`, `stop_gradient` and random masks: the metric is that of the gradients as they are."""

    @jax.custom_vjp
    def doubled(x, w):
        return x @ w

    doubled.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (2 * g @ r[1].T, 2 * r[0].T @ g))
    params = {"w": normal(1, 4, 5), "frozen": normal(2, 5, 5), "v": normal(3, 5, 3), "b": normal(4, 3)}

    def model(params, x):
        hidden = jnp.tanh(doubled(x, params["w"]))
        hidden = hidden @ lax.stop_gradient(params["frozen"])
        return affine(hidden, params["v"], params["b"])

    x = normal(5, 1, 4)
    rows = jax.jacrev(lambda p: model(p, x)[0])(params)
    flat = np.concatenate([np.asarray(leaf).reshape(3, -1) for leaf in jax.tree.leaves(rows)], axis=1)
    K = kfac(model, SQUARES, params, x)
    assert max(relative_errors(K, flat.T @ flat)) < 1e-10
    assert K.report()["params['frozen']"].structure == "zero"


# Shared positions: expand where each has a term of its own, reduce where they are pooled.


@pytest.mark.compat
@pytest.mark.slow
def test_expand_and_reduce_are_exact_where_they_belong():
    params = {"w": normal(1, 4, 5), "v": normal(2, 5, 3), "b": normal(3, 3)}
    each = lambda params, x: affine(x @ params["w"], params["v"], params["b"])
    pooled = lambda params, x: jnp.mean(each(params, x), axis=1)
    x = normal(4, 6, 7, 4)
    for model, right, wrong in ((each, "expand", "reduce"), (pooled, "reduce", "expand")):
        metric = exact(model, SQUARES, params, x)
        errors = {
            s: max(relative_errors(kfac(model, SQUARES, params, x, blocks=ng.BlockRules(sharing=s)), metric))
            for s in (right, wrong)
        }
        assert errors[right] < 1e-10 and errors[wrong] > 1e-2


def convolve(x, kernel, rank, **options):
    space = "DHW"[-rank:]
    numbers = (f"N{space}C", f"{space}IO", f"N{space}C")
    strides = options.pop("strides", (1,) * rank)
    return lax.conv_general_dilated(x, kernel, strides, dimension_numbers=numbers, **options)


CONVOLUTIONS = {
    "same": (2, (3, 3, 2, 3), {"padding": "SAME"}),
    "valid": (2, (3, 2, 2, 3), {"padding": "VALID"}),
    "explicit": (2, (3, 3, 2, 3), {"padding": [(2, 0), (0, 1)]}),
    "strided": (2, (3, 3, 2, 3), {"padding": "SAME", "strides": (2, 3)}),
    "dilated": (2, (2, 2, 2, 3), {"padding": "VALID", "rhs_dilation": (2, 1)}),
    "transposed": (2, (3, 3, 2, 3), {"padding": [(1, 2), (2, 1)], "lhs_dilation": (2, 2)}),
    "grouped": (2, (3, 3, 1, 4), {"padding": "SAME", "feature_group_count": 2}),
    "line": (1, (3, 2, 3), {"padding": "SAME"}),
    "space": (3, (2, 2, 2, 2, 3), {"padding": "VALID"}),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_are_exact_where_they_should_be(name):
    rank, shape, options = CONVOLUTIONS[name]
    params = {"kernel": normal(1, *shape), "bias": normal(2, shape[-1])}
    x = normal(3, 3, *(4,) * rank, 2)

    def each(params, x):
        y = convolve(x, params["kernel"], rank, **dict(options))
        return y + along(params["bias"], y)

    pooled = lambda params, x: jnp.mean(each(params, x).reshape(len(x), -1, shape[-1]), axis=1)
    for model, right, wrong in ((each, "expand", "reduce"), (pooled, "reduce", "expand")):
        metric = exact(model, SQUARES, params, x)
        errors = {
            s: max(relative_errors(kfac(model, SQUARES, params, x, blocks=ng.BlockRules(sharing=s)), metric))
            for s in (right, wrong)
        }
        assert errors[right] < 1e-10 and errors[wrong] > 1e-2


# What curvlinops computes.


def linear(x, w, b):
    y = x @ w.T
    return y + along(b, y)


def perceptron(activation):
    def model(params, x):
        for w, b in zip(params[:-2:2], params[1:-2:2], strict=True):
            x = activation(linear(x, w, b))
        return linear(x, *params[-2:])

    return model


def convolutional(params, x):
    spec = ("NCHW", "OIHW", "NCHW")
    layer = lambda x, w, b, stride: (
        lax.conv_general_dilated(x, w, (stride, stride), [(1, 1), (1, 1)], dimension_numbers=spec)
        + b[None, :, None, None]
    )
    x = jax.nn.relu(layer(x, *params[:2], 1))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = jnp.tanh(layer(x, *params[2:4], 2))
    return linear(x.reshape(x.shape[0], -1), *params[4:])


def sequence(params, x):
    x = jnp.tanh(linear(x, *params[:2]))
    return linear(jnp.mean(jnp.tanh(linear(x, *params[2:4])), axis=1), *params[4:])


# The last is the part of their loss that each output is averaged with.
CURVLINOPS = {
    "mlp_ce": (perceptron(jnp.tanh), SOFTMAX, 1.0),
    "mlp_mse": (perceptron(jax.nn.sigmoid), SQUARES, 2 / 3),
    "mlp_bce": (perceptron(jnp.tanh), ng.Fisher(ng.Bernoulli()), 1 / 5),
    "conv_ce": (convolutional, SOFTMAX, 1.0),
    "seq_ce": (sequence, SOFTMAX, 1.0),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CURVLINOPS)
def test_factors_are_those_of_curvlinops(name, monkeypatch):
    """Which counts positions without a cotangent too, such as those that a rectifier switches off."""
    alive = KroneckerEstimator._num_live
    everywhere = lambda self, recording, member: jnp.ones_like(alive(self, recording, member))
    monkeypatch.setattr(KroneckerEstimator, "_num_live", everywhere)
    model, geometry, scale = CURVLINOPS[name]
    geometry = scale * geometry
    data = np.load(DATA / f"{name}.npz")
    count = sum(key[1:].isdigit() for key in data.files)
    params, x = [jnp.asarray(data[f"p{k}"]) for k in range(count)], jnp.asarray(data["X"])
    kinds = {"sep": "separate", "joint": "joint"}
    options = {f"{s}_{short}": ng.BlockRules(s, kinds[short]) for s in ("expand", "reduce") for short in kinds}

    @jax.jit
    def found(params, x):
        K = {name: ng.kfac(model, geometry, params, x, blocks=rules).as_matrix() for name, rules in options.items()}
        return model(params, x), K, ng.ekfac(model, geometry, params, x).as_matrix()

    z, K, Q = found(params, x)
    np.testing.assert_allclose(z, data["logits"], rtol=1e-10, atol=1e-12)
    for name, matrix in K.items():
        np.testing.assert_allclose(matrix, data[f"kfac_{name}"], rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(Q, data["ekfac_joint"], rtol=1e-9, atol=1e-12)
