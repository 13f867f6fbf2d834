"""Laws in single precision at sizes where compilers choose other kernels (above 2^15 entries), against the same in
double precision. JAX 0.10.2 is wrong by 6 to 150 % at most of them, and right below."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import GEOMETRIES, ravel
from models import normal
from zoo import integers

import natgrad as ng
from natgrad import _backend
from natgrad._optimiser.cost import Cost, Pass, term_on_batch

pytestmark = [pytest.mark.float32, pytest.mark.compat, pytest.mark.users_defaults]

NUM_TANGENTS, NUM_EXAMPLES = 50, 400


def in_both_precisions(build) -> tuple[Any, Any]:
    """`compute(*arguments)` for `compute, arguments = build()`, compiled, in single and in double precision."""
    found = []
    for is_double in (False, True):
        with jax.enable_x64(is_double):
            compute, arguments = build()
            found.append(jax.tree.map(np.asarray, jax.jit(compute)(*arguments)))
    return found[0], found[1]


def assert_agree(build, tolerance: float) -> None:
    single, double = in_both_precisions(build)
    assert jax.tree.structure(single) == jax.tree.structure(double)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(single), jax.tree.leaves(double), strict=True):
        assert_near(a, b, tolerance, jax.tree_util.keystr(path))


def assert_near(found, expected, tolerance: float, what: str = "it") -> None:
    off = np.max(np.abs(np.asarray(found) - expected)) / max(np.max(np.abs(expected)), 1e-30)
    assert off < tolerance, f"{what} is off by {off:.1e}"


@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometries(name):
    """Products with many tangents at once, factors and dissimilarities of many outputs, against factors in double
    precision. Half the examples are at one output, half at the other."""
    geometry, z, other, _ = GEOMETRIES[name]()
    repeat = lambda a, b: np.repeat(np.stack([a, b]), NUM_EXAMPLES // 2, axis=0)
    first, second = jax.tree.map(repeat, z, other), jax.tree.map(repeat, other, z)
    tangents = jax.tree.map(lambda leaf: normal(3, NUM_TANGENTS, *leaf.shape), first)

    @jax.jit
    def compute(z, z0, v):
        product = jax.vmap(jax.vmap(geometry.metric_mv), (None, 0))(z, v)
        # Factors are unique up to the signs of columns, of which their squares know nothing.
        squares = jax.tree.map(lambda s: jnp.sum(s**2, axis=1), jax.vmap(geometry.factor)(z))
        return product, squares, jax.vmap(geometry.dissimilarity)(z, z0)

    *found, distances = compute(first, second, tangents)
    with jax.enable_x64(True):
        geometry, z, other, _ = GEOMETRIES[name]()
        both = [jax.tree.map(lambda a, b: np.stack([a, b]), *pair) for pair in ((z, other), (other, z))]
        exact = jax.jit(lambda z, z0: (jax.vmap(geometry.factor)(z), jax.vmap(geometry.dissimilarity)(z, z0)))(*both)
    flatten = lambda tree, num_axes: [
        np.asarray(leaf, float).reshape(*leaf.shape[:num_axes], -1) for leaf in jax.tree.leaves(tree)
    ]
    spread = lambda array: np.repeat(np.asarray(array), NUM_EXAMPLES // 2, axis=0)
    factors = [spread(leaf) for leaf in flatten(exact[0], 2)]
    along = sum(np.einsum("ncd,tnd->tnc", s, v) for s, v in zip(factors, flatten(tangents, 2), strict=True))
    expected = [np.einsum("ncd,tnc->tnd", s, along) for s in factors], [np.sum(s**2, axis=1) for s in factors]
    for trees, num_axes, references in zip(found, (2, 1), expected, strict=True):
        for leaf, reference in zip(flatten(trees, num_axes), references, strict=True):
            assert_near(leaf, reference, 1e-4)
    assert_near(distances, spread(exact[1]), 1e-4)


def perceptron(params, x):
    return jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]


def perceptron_case(num_examples: int, num_classes: int):
    params = {"w": normal(1, 6, 9), "b": normal(2, 9), "v": normal(3, 9, num_classes)}
    return perceptron, params, normal(4, num_examples, 6)


def attention(params, x):
    h = params["table"][x]
    q, k, v = (jnp.einsum("ntd,de->nte", h, params[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("nte,nse->nts", q, k), axis=-1)
    return jnp.einsum("nts,nse->nte", weights, v) @ params["out"]


def attention_case(num_examples: int, num_classes: int):
    params = {"table": normal(1, 20, 6), "out": normal(2, 6, num_classes)}
    params |= {name: normal(k, 6, 6) for k, name in enumerate("qkv")}
    return attention, params, integers(5, 0, 20, num_examples, 64)


def convolution(params, x):
    hidden = jax.lax.conv_general_dilated(
        x, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.mean(jax.nn.softplus(hidden), axis=(1, 2)) @ params["head"]


def convolution_case(num_examples: int, num_classes: int):
    params = {"kernel": normal(1, 3, 3, 2, 4), "head": normal(2, 4, num_classes)}
    return convolution, params, normal(3, num_examples, 6, 6, 2)


CASES = {
    "many_examples": lambda: perceptron_case(2000, 10),
    "many_classes": lambda: perceptron_case(100, 200),
    "tokens": lambda: attention_case(16, 85),
    "images": lambda: convolution_case(500, 10),
}
FISHER = ng.Fisher(ng.Categorical())


@pytest.mark.parametrize("name", CASES)
def test_products_with_a_metric(name):
    """Several at once, as matrices, diagonals and the quadratic model of an optimiser need them."""

    def build():
        model, params, x = CASES[name]()
        vectors = jax.tree.map(lambda leaf: normal(7, 20, *leaf.shape), params)

        def compute(params, x, vectors):
            metric = ng.pullback(model, FISHER, params, x)
            few = metric.restrict({key: key in ("w", "kernel", "q") for key in params})
            cost = Cost([term_on_batch(ng.Term(model, ng.Categorical()), ng.Batch(x))])
            point = cost.at(params, Pass(1.0, jnp.array(0), has_sites=True))
            flat = jax.vmap(ravel)(vectors)
            unflatten = jax.flatten_util.ravel_pytree(params)[1]
            return {
                "products": jax.vmap(metric.mv)(vectors),
                "lengths": jax.vmap(metric.norm)(vectors),
                "matrix": few._by_columns(lambda column, index: column),
                "model": point.inner_products(list(flat[:2]), unflatten),
            }

        return compute, (params, x, vectors)

    assert_agree(build, 1e-4)


def few_outputs(model):
    """The model with five outputs, so that exact backward passes are few."""
    return lambda params, x: jnp.mean(model(params, x).reshape(x.shape[0], -1, 5), axis=1)


@pytest.mark.parametrize("name", ["many_examples", "tokens", "images"])
def test_statistics_of_examples(name):
    """Sums of squares, norms and inner products of gradients, and Kronecker factors."""

    def build():
        whole, params, x = CASES[name]()
        model = few_outputs(whole)
        columns = lambda z: jnp.stack([jnp.sin(z + k) for k in range(3)])

        def compute(params, x):
            rows = ng.per_example(model, params, x, columns)
            return {
                "gradient": rows.gradient(),
                "squares": rows.squared_sum(),
                "norms": rows.norms(),
                "gram": ng.per_example(model, params, x[:200], columns).gram(),
                "diagonal": ng.diagonal(model, FISHER, params, x).entries,
                "kfac": ng.kfac(model, FISHER, params, x).diagonal(),
                "ekfac": ng.ekfac(model, FISHER, params, x).mv(params),
            }

        return compute, (params, x)

    assert_agree(build, 1e-4)


def test_many_rows_at_once_are_the_rows_one_by_one():
    sizes = (784, 1000, 1000, 10)
    params = [normal(i, a, b) / a**0.5 for i, (a, b) in enumerate(zip(sizes, sizes[1:], strict=False))]

    def model(params, x):
        for w in params[:-1]:
            x = jax.nn.relu(x @ w)
        return x @ params[-1]

    metric = jax.jit(lambda: ng.pullback(model, FISHER, params, normal(9, 256, 784)))()
    round_trip = lambda metric, u: metric.root_mv(metric.root_transpose_mv(u))
    rows = np.linspace(0, metric.root_size - 1, 18).astype(int)
    basis = jnp.asarray(np.eye(metric.root_size, dtype=np.float32)[rows])
    together = jax.jit(jax.vmap(round_trip, (None, 0)))(metric, basis)
    single = jax.jit(round_trip)
    alone = np.stack([single(metric, u) for u in basis])
    np.testing.assert_allclose(together, alone, atol=1e-4 * np.abs(alone).max())


def test_a_compiler_that_is_wrong_is_refused(monkeypatch):
    """At the first use of anything, with the version, the size of the error and what to do."""
    wrong = lambda function: lambda *operands: [1.5 * result for result in function(*operands)]
    _backend.error_of.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(jax, "jit", wrong)
            _backend.error_of("cpu")
        message = (
            rf"(?s)JAX {jax.__version__} computes wrong numbers on cpu.*off by 50 %.*pip install 'jax!=.*XLA_FLAGS="
        )
        for use in (
            lambda: ng.pullback(perceptron, ng.Euclidean(), *perceptron_case(3, 2)[1:]),
            lambda: FISHER.metric_mv(jnp.zeros(3), jnp.ones(3)),
            lambda: ng.NaturalGradient(perceptron, ng.Categorical()).init(
                perceptron_case(3, 2)[1], (jnp.ones((3, 6)), jnp.zeros(3, int))
            ),
        ):
            with pytest.raises(RuntimeError, match=message):
                use()
    finally:
        _backend.error_of.cache_clear()
