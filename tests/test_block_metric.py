"""Metrics made of blocks as operators: dense algebra, single precision, and what they refuse."""

import functools
import re
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_mean, flat, ravel
from models import normal
from zoo import affine, along, integers

import natgrad as ng
from natgrad._block.kronecker import KroneckerBlock
from natgrad._block.rules import _sorted_structures, check_blocks
from natgrad._block.unfactored import DiagonalBlock

SQUARES = ng.Euclidean()
SOFTMAX = ng.Fisher(ng.Categorical())


def parts():
    """Every kind of block: a joint bias, a table, a scale and shift, a dense and a diagonal parameter, one unused."""
    params = {
        "table": normal(1, 7, 4),
        "norm": {"scale": normal(2, 4), "shift": normal(3, 4)},
        "layer": {"w": normal(4, 4, 5), "b": normal(5, 5)},
        "power": normal(6, 5),
        "unused": normal(7, 2),
    }

    def model(params, tokens):
        x = jnp.tanh(params["table"][tokens])
        x = x * along(params["norm"]["scale"], x) + along(params["norm"]["shift"], x)
        x = jnp.tanh(affine(x, **params["layer"]))
        return jnp.mean(jnp.sin(x * along(params["power"], x)), axis=1)

    return model, params, integers(8, 0, 6, 9, 3)


def build(function=ng.kfac, dtype=None, **options):
    model, params, x = parts()
    if dtype is not None:
        params = jax.tree.map(lambda p: p.astype(dtype), params)
    structures = {"params['power']": "diagonal"}
    return jax.jit(lambda p: function(model, SQUARES, p, x, **options, blocks=ng.BlockRules(structures=structures)))(
        params
    )


@functools.cache
def metric(name):
    return build(getattr(ng, name))


@pytest.mark.sample(1)
@pytest.mark.compat
@pytest.mark.parametrize("name", ["kfac", "ekfac"])
def test_algebra_is_that_of_the_dense_matrix(name, getkey):
    v = jax.tree.map(lambda p: np.cos(3 * p), parts()[1])

    @jax.jit
    def everything(K, v, key):
        product, inverse = K.mv(v), K.inverse(0.1)
        return dict(
            matrix=K.as_matrix(),
            product=ravel(product),
            diagonal=ravel(K.diagonal()),
            trace=K.trace(),
            root=K.sqrt().as_matrix(),
            logdets=(K.logdet(0.1), K.logdet()),
            inverse=inverse.as_matrix(),
            failures=inverse.failures,
            pseudo=K.inverse().as_matrix(),
            back=ravel(inverse.mv(jax.tree.map(lambda a, b: a + 0.1 * b, product, v))),
            draws=jax.vmap(lambda key: ravel(K.sample(key)))(jax.random.split(key, 4000)),
        )

    found = SimpleNamespace(**jax.tree.map(np.asarray, everything(metric(name), v, getkey())))
    matrix, v = found.matrix, flat(v)
    damped = matrix + 0.1 * np.eye(len(matrix))
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-15)
    np.testing.assert_allclose(found.product, matrix @ v, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(found.diagonal, np.diagonal(matrix), rtol=1e-10, atol=1e-15)
    np.testing.assert_allclose(found.trace, np.trace(matrix), rtol=1e-12)
    np.testing.assert_allclose(found.root @ found.root, matrix, atol=1e-12)
    np.testing.assert_allclose(found.logdets[0], np.linalg.slogdet(damped)[1], rtol=1e-10)
    assert found.logdets[1] == -np.inf
    np.testing.assert_allclose(found.inverse, np.linalg.inv(damped), rtol=1e-9, atol=1e-10)
    pseudo = np.linalg.pinv(matrix, rcond=1e-11)
    np.testing.assert_allclose(found.pseudo, pseudo, atol=1e-6 * np.abs(pseudo).max())
    assert found.failures == 0
    np.testing.assert_allclose(found.back, v, rtol=1e-9)
    assert_mean(found.draws**2, np.diagonal(matrix))


def damped_by_factors(block, damping):
    identity = lambda matrix: jnp.eye(matrix.shape[-1])[(None,) * (matrix.ndim - 2)]
    if isinstance(block, DiagonalBlock):
        return DiagonalBlock(block.values + damping)
    if not isinstance(block, KroneckerBlock):
        return type(block)(block.matrix + damping * identity(block.matrix))

    def mean(F):
        """Of the eigenvalues; blocks of zeros, as of rows of a table that are not read, do not count."""
        traces = jnp.trace(F, axis1=2, axis2=3)
        count = jnp.sum((traces > 0).astype(F.dtype), axis=1) * F.shape[-1]
        return (jnp.sum(traces, axis=1) / count)[:, None, None, None]

    ratio = jnp.sqrt(mean(block.A) / mean(block.B))
    A = block.A + ratio * damping**0.5 * identity(block.A)
    return KroneckerBlock(A, block.B + damping**0.5 / ratio * identity(block.B))


def test_factored_damping_is_the_dense_inverse_of_the_damped_factors():
    @jax.jit
    def matrices(K):
        damped = K.operator.replaced([damped_by_factors(block, 0.1) for block in K.operator.blocks])
        return K.as_matrix(), damped.as_matrix(), K.inverse(0.1, factored=True).as_matrix()

    matrix, damped, inverse = map(np.asarray, matrices(metric("kfac")))
    np.testing.assert_allclose(inverse, np.linalg.inv(damped), rtol=1e-9, atol=1e-10)
    assert np.abs(np.linalg.inv(matrix + 0.1 * np.eye(len(matrix))) - inverse).max() > 1e-3


def test_solving_goes_block_by_block():
    K = metric("kfac")
    covector = jax.tree.map(lambda p: jnp.asarray(np.sin(2 * p)), parts()[1])
    solve = lambda K, c, **options: ng.solve(K, c, damping=0.1, **options)
    solution, dense = jax.jit(lambda K, c: (solve(K, c), solve(K, c, solver=ng.Cholesky())))(K, covector)
    assert solution.solver == "Blockwise, because the metric is made of blocks"
    assert solution.result == ng.RESULTS.successful and solution.stats["residual"] < 1e-10
    np.testing.assert_allclose(flat(solution.value), flat(dense.value), rtol=1e-9)
    typed = jax.eval_shape(lambda K, c: (solve(K, c).value, K.inverse(0.1).mv(c)), K, ng.Covector(covector))
    assert all(isinstance(value, ng.Vector) for value in typed)


def test_single_precision_is_close_and_symmetric():
    K = build(dtype=np.float32)
    as_matrix = jax.jit(lambda K: K.as_matrix())
    matrix, exact = np.asarray(as_matrix(K)), np.asarray(as_matrix(metric("kfac")))
    assert matrix.dtype == np.float32
    assert np.linalg.norm(matrix - exact) < 1e-5 * np.linalg.norm(matrix)
    for block in K.operator.blocks:
        for stored in map(np.asarray, block.matrices()):
            size = np.abs(stored).max()
            assert np.abs(stored - stored.mT).max() < 1e-6 * size
            assert np.linalg.eigvalsh(stored).min() > -1e-6 * size
    covector = jax.tree.map(lambda p: np.cos(3 * p).astype(np.float32), parts()[1])
    damping = 1e-3 * float(np.linalg.norm(matrix, 2))
    expected = np.linalg.solve(exact + damping * np.eye(len(matrix)), flat(covector))
    found = flat(jax.jit(lambda K, damping, c: K.inverse(damping).mv(c))(K, damping, covector))
    assert np.linalg.norm(found - expected) < 1e-4 * np.linalg.norm(expected)


HARD = {
    "dead_relu": (lambda p, x: jax.nn.relu(affine(x, **p[0]) - 1e6) @ p[1], 1.0),
    "constant_input": (lambda p, x: jnp.tanh(affine(0 * x + 1, **p[0])) @ p[1], 1.0),
    "width_one": (lambda p, x: jnp.tanh(affine(x, **p[0]))[:, :1] @ p[1][:1], 1.0),
    "large": (lambda p, x: jnp.tanh(affine(x, **p[0])) @ p[1], 1e12),
    "small": (lambda p, x: jnp.tanh(affine(x, **p[0])) @ p[1], 1e-12),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("factored", [False, True])
def test_hard_cases_in_single_precision_stay_finite(name, factored):
    """Fewer examples than inputs, so that factors are singular; damping far below rounding."""
    model, scale = HARD[name]
    params = [{"w": normal(1, 20, 6), "b": normal(2, 6)}, normal(3, 6, 2)]
    params, x = jax.tree.map(lambda p: np.asarray(p, np.float32), (params, normal(4, 4, 20)))

    @jax.jit
    def solutions(params, x, dampings):
        K = ng.kfac(model, jnp.float32(scale) * SQUARES, params, x)
        return jax.lax.map(lambda d: K.inverse(d, factored=factored).mv(params), dampings), K.inverse().mv(params)

    assert np.all(np.isfinite(flat(solutions(params, x, np.array([1e-8, 1e-2], np.float32)))))


@pytest.mark.compat
def test_the_last_good_inverse_is_kept_and_counted():
    @functools.partial(jax.jit, static_argnames="factored")
    def inverses(K, factored):
        broken = jax.tree.map(lambda x: x * jnp.nan, K.operator.blocks[0])
        bad = K.operator.replaced([broken, *K.operator.blocks[1:]])
        partly = ng.BlockMetric(bad, K.report(), K.num_examples)
        good = K.inverse(0.1, factored=factored)
        again = partly.inverse(0.5, factored=factored, previous=good)
        alone = partly.inverse(0.5, factored=factored)
        return good, again, again.as_matrix(), alone.failures, K.inverse(0.5, factored=factored)

    for factored in (False, True):
        good, again, matrix, failures, fresh = inverses(metric("kfac"), factored)
        assert again.failures == 1 and failures == 1
        assert np.all(np.isfinite(matrix))
    np.testing.assert_array_equal(again.operator.blocks[0].A, good.operator.blocks[0].A)
    pairs = zip(*(jax.tree.leaves(one.operator.blocks[1:]) for one in (again, fresh)), strict=True)
    for mine, expected in pairs:
        np.testing.assert_allclose(mine, expected, rtol=1e-12)


def test_zero_damping_keeps_what_can_be_told_from_zero():
    """In single precision a factor with eigenvalues from 1 to 100 on each side loses no direction."""
    scales, ones = np.linspace(1.0, 10.0, 60, dtype=np.float32), np.ones((60, 60), np.float32)
    model = lambda p, x: x @ p * scales[None]

    @jax.jit
    def solved(params, x):
        return ng.solve(ng.kfac(model, SQUARES, params, x), params, damping=0.0)

    solution = solved(ones, np.diag(scales) * np.float32(60**0.5))
    expected = 1 / np.outer(scales, scales) ** 2
    np.testing.assert_allclose(solution.value, expected, rtol=1e-3)


def test_a_solution_that_is_not_one_is_said_to_be_inaccurate():
    model = lambda p, x: jnp.tanh(x @ p)
    params, x = (np.asarray(array, np.float32) for array in (normal(1, 20, 30), normal(2, 4, 20)))
    solved = jax.jit(lambda p, x: ng.solve(ng.kfac(model, SQUARES, p, x), p, damping=np.float32(1e-9)))
    solution = solved(params, x)
    assert solution.result == ng.RESULTS.inaccurate and np.all(np.isfinite(solution.value))


@pytest.mark.users_defaults
def test_diagonals_are_not_rounded_to_the_parameters():
    params = {"w": 30 * np.asarray(normal(1, 6, 5), np.float16)}
    model = lambda p, x: 100 * (x @ p["w"].astype(np.float32))
    K = jax.jit(lambda p, x: ng.kfac(model, SQUARES, p, x))(params, 30 * np.asarray(normal(2, 3, 6), np.float32))
    trace, matrix = jax.jit(lambda K: (K.trace(), K.as_matrix()))(K)
    np.testing.assert_allclose(trace, np.trace(matrix), rtol=1e-5)
    assert np.isfinite(trace)


# Reports.


def test_the_report_is_a_table_and_a_mapping():
    report = metric("kfac").report()
    row = report["params['layer']['w']"]
    assert (row.shape, row.uses, row.structure, row.factors) == ((4, 5), 1, "kronecker", ((5, 5), (5, 5)))
    assert (row.numbers, row.bytes) == (50, 400)
    assert report["params['layer']['b']"].shares == "params['layer']['w']"
    assert report["params['table']"].factors == ((7, 1, 1), (4, 4))
    structures = {path: row.structure for path, row in report.items()}
    assert structures["params['norm']['shift']"] == "scale and shift"
    assert structures["params['power']"] == "diagonal" and structures["params['unused']"] == "zero"
    assert not report.fallbacks and report.numbers == sum(row.numbers for row in report.values())
    text = str(report)
    assert "with params['layer']['w']" in text and "no output depends on it" in text
    assert text.splitlines()[0].split() == ["parameter", "shape", "uses", "structure", "factors", "memory", "note"]
    assert metric("ekfac").report()["params['layer']['w']"].structure == "eigenvalue-corrected"
    with pytest.raises(KeyError):
        report["params['nobody']"]


def opaque(params, x):
    return jnp.tanh(x @ jnp.exp(params["w"]))


def test_a_fallback_is_warned_of_once_and_refused_if_strict():
    params, x = {"w": normal(1, 12, 12)}, normal(2, 3, 12)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        K = ng.kfac(opaque, SQUARES, params, x)
    assert len(caught) == 1
    assert "`params['w']` is diagonal (the weight is computed from the parameter, not copied)" in str(caught[0].message)
    assert K.report().fallbacks[0].path == "params['w']"
    message = "`kfac` with `strict=True` needs a structure for every parameter, but `params['w']` is diagonal"
    with pytest.raises(ValueError, match=re.escape(message)):
        ng.kfac(opaque, SQUARES, params, x, blocks=ng.BlockRules(strict=True))
    ng.kfac(opaque, SQUARES, params, x, blocks=ng.BlockRules(strict=True, structures={"params['w']": "diagonal"}))


def dropped(params, x):
    """A product of matrices whose weight differs from example to example."""
    return jnp.tanh(jnp.einsum("ni,nio->no", x, jnp.where(x[:, :, None] > 0, params["w"][None], 0.0)))


def test_a_product_that_is_written_out_is_a_fallback():
    params, x = {"w": normal(1, 12, 12)}, normal(2, 3, 12)
    with pytest.raises(ValueError, match="is diagonal \\(used by `select_n`\\)"):
        ng.kfac(dropped, SQUARES, params, x, blocks=ng.BlockRules(strict=True))
    K = ng.kfac(
        lambda p, x: jnp.sin(x * p[None]), SQUARES, normal(1, 200), normal(2, 3, 200), blocks=ng.BlockRules(strict=True)
    )
    assert K.report()["params"].reason == "it acts entry by entry"


# Errors.


def assert_refused(
    message, function=ng.kfac, model=None, params=None, x=None, geometry=SQUARES, error=ValueError, mask=None, **options
):
    own_model, own_params, own_x = parts()
    x = own_x if x is None else x
    x = ng.Batch(x, mask=mask) if mask is not None else x
    with pytest.raises(error, match=re.escape(message)):
        function(model or own_model, geometry, params or own_params, x, **options)


def test_options_of_another_type():
    """As a user sees them, whose calls are not checked for types before they arrive."""
    with pytest.raises(TypeError, match="needs `structures` to map paths to structures, but got \\['dense'\\]"):
        _sorted_structures(["dense"])


BAD_RULES = {
    "sharing": (dict(sharing="sum"), "`BlockRules` needs `sharing` to be one of ('expand', 'reduce'), but got 'sum'."),
    "bias": (dict(bias="none"), "`BlockRules` needs `bias` to be one of ('joint', 'separate'), but got 'none'."),
    "oversized": (dict(oversized="identity"), "`BlockRules` needs `oversized` to be one of ('diagonal', 'blocked')"),
    "max_factor": (
        dict(max_factor=0),
        "`BlockRules` needs `max_factor` to be a whole number of at least 1, but got 0.",
    ),
    "max_dense": (dict(max_dense=0), "`BlockRules` needs `max_dense` to be a whole number of at least 1, but got 0."),
    "structures": (dict(structures={"a": "full"}), "needs a structure among ('kronecker', 'eigenvalue-corrected',"),
}


@pytest.mark.parametrize("name", BAD_RULES)
def test_bad_rules(name):
    options, message = BAD_RULES[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        ng.BlockRules(**options)


def test_bad_options():
    assert_refused("`kfac` needs `num_samples` to be a whole number of at least 1, but got 0.", num_samples=0)
    assert_refused(
        "`kfac`: there is no parameter at `params['tabel']`, which is a path in `structures`.",
        blocks=ng.BlockRules(structures={"params['tabel']": "dense"}),
    )
    assert_refused(
        "`kfac`: `params['power']` cannot have a Kronecker structure, because it acts entry by entry.",
        blocks=ng.BlockRules(structures={"params['power']": "kronecker"}),
    )


@pytest.mark.parametrize("make", [lambda: check_blocks("reduce"), lambda: check_blocks({"sharing": "reduce"})])
def test_rules_are_an_object(make):
    with pytest.raises(TypeError, match=r"needs `blocks` to be `BlockRules\(...\)`, but got `(str|dict)`"):
        make()


def test_bad_models_and_geometries():
    assert_refused("`kfac` got `params` without any array.", params=[{}])
    assert_refused("needs parameters that are real floating-point arrays", params={"w": jnp.arange(3)}, error=TypeError)

    class Unfinished(ng.Euclidean):
        def _factor(self, z):
            raise NotImplementedError

    class Misshapen(ng.Euclidean):
        def _factor(self, z):
            return z

    assert_refused("`Unfinished` has no factor, so backward passes", geometry=Unfinished(), error=TypeError)
    assert_refused("`Misshapen.factor` needs to return columns like the output", geometry=Misshapen())
    model, params, x = parts()
    sampled = jax.jit(lambda p, x, key: ng.kfac(model, Unfinished(), p, x, key=key).trace())
    assert np.isfinite(sampled(params, x, jax.random.key(0)))
    infinite = lambda p, x: p["power"][None] + jnp.inf * (1.0 + x[:, :1].astype(float))
    assert_refused("needs finite numbers", model=infinite)
    overflow = lambda p, x: (x @ p["w"]) * 1e200
    assert_refused(
        "`kfac` needs finite numbers in every factor, but the factors of `params['w']` are not.",
        model=overflow,
        params={"w": normal(1, 3, 2)},
        x=normal(2, 5, 3),
    )
    coupled = lambda p, x: (x - jnp.mean(x, axis=0, keepdims=True)) @ p["w"]
    assert_refused("couples examples", model=coupled, params={"w": normal(1, 3, 2)}, x=normal(2, 5, 3))


def test_bad_masks():
    assert_refused("`kfac` needs `mask` to be an array with the 9 examples in front", mask=np.ones(9))
    assert_refused("`kfac` needs `mask` to be an array with the 9 examples in front", mask=np.ones((8, 3)))
    assert_refused("`kfac` needs `mask` to hold zeros and ones", mask=np.full((9, 3), 0.5))
    assert_refused("but got list", mask=[[1, 0]])
    assert_refused(
        "a mask over positions (4,) fits the positions (3,) at which `params['layer']['w']` is used nowhere",
        mask=np.ones((9, 4)),
    )
    assert_refused(
        "`mask[\"params['layer']['b']\"]` is for a parameter that is no weight",
        mask={"params['layer']['b']": np.ones((9, 3))},
    )
    assert_refused("an output has the shape (9, 5) of the mask", mask=np.ones((9, 5)))
    assert_refused("there is no parameter at `params['layr']`", mask={"params['layr']": np.ones((9, 3))})
    assert_refused("`mask['z']` of shape (9, 3) fits no output; their shapes are [(9, 5)]", mask={"z": np.ones((9, 3))})


def test_bad_use_of_the_metric():
    K, Q = metric("kfac"), metric("ekfac")
    with pytest.raises(ValueError, match="`BlockMetric.inverse`: `damping` needs a number of at least 0"):
        K.inverse(-1.0)
    with pytest.raises(ValueError, match="`BlockMetric.logdet`: `damping` must be one number"):
        K.logdet(jnp.ones(2))
    other = ng.kfac(lambda p, x: x @ p, SQUARES, normal(1, 3, 2), normal(2, 4, 3))
    with pytest.raises(ValueError, match="`previous` inverse of another model"):
        K.inverse(0.1, previous=other.inverse(0.1))
    with pytest.raises(ValueError, match="use the same metric and the same `factored` for both"):
        K.inverse(0.1, previous=K.inverse(0.1, factored=True))
    assert_refused("`ekfac` got a `basis` of another model, or in other blocks.", ng.ekfac, basis=other)
    with pytest.raises(TypeError, match="cannot average metrics in eigenvectors of their own"):
        ng.RunningAverage().init(Q)
    with pytest.raises(TypeError, match="cannot average metrics in eigenvectors of their own"):
        ng.accumulate(lambda x: ng.ekfac(parts()[0], SQUARES, parts()[1], x), [parts()[2]], progress=False)
    with pytest.raises(ValueError, match="`BlockInverse.mv` needs a tree with the structure"):
        K.inverse(0.1).mv(jnp.ones(3))
    with pytest.raises(TypeError, match="`Blockwise` needs a metric made of blocks"):
        from natgrad._solve.direct import Blockwise

        ng.solve(ng.identity(jnp.ones(3)), jnp.ones(3), damping=0.1, solver=Blockwise())
