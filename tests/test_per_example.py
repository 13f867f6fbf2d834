"""Statistics of single examples' gradients equal brute force, for every model of the zoo."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brute_force import flat_rows, gradients
from zoo import ZOO

import natgrad as ng

REMATERIALISED = ("transformer_untied_remat", "scan_layers_remat_reverse", "deep_remat", "flax_linen_scan_remat")


def normal(like, *lead, seed=0):
    """Random numbers like a tree of arrays or shapes, with more axes in front."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=(*lead, *leaf.shape)).astype(leaf.dtype)), like)


def assert_all_equal(case, cotangents, num_rows, tolerance, **options):
    """Every statistic, against the rows of brute force; errors are relative to the largest entry."""
    lead = num_rows if len(num_rows) > 1 else num_rows[:1]
    v, u = normal(case.params, seed=1), normal(jax.ShapeDtypeStruct(lead, jnp.result_type(float)), seed=2)

    @jax.jit
    def statistics(params, x, cotangents, v, u):
        rows = ng.per_example(case.model, params, ng.Batch(x, in_axes=case.in_axes), cotangents, **options)
        return {
            "gradient": rows.gradient(),
            "squared_sum": rows.squared_sum(),
            "power_sum": rows.power_sum(4),
            "norms": rows.norms(),
            "gram": rows.gram(),
            "rows": rows.rows(),
            "matvec": rows.matvec(v),
            "rmatvec": rows.rmatvec(u),
        }

    G = flat_rows(gradients(case, cotangents), len(lead))
    flat = lambda tree: np.concatenate([np.ravel(np.asarray(leaf, float)) for leaf in jax.tree.leaves(tree)])
    expected = {
        "gradient": G.sum(0),
        "squared_sum": (G**2).sum(0),
        "power_sum": (G**4).sum(0),
        "norms": np.sqrt((G**2).sum(1)).reshape(lead),
        "gram": (G @ G.T).reshape(*lead, *lead),
        "matvec": (G @ flat(v)).reshape(lead),
        "rmatvec": np.asarray(u, float).ravel() @ G,
    }
    found = statistics(case.params, case.x, cotangents, v, u)
    found["rows"], expected["rows"] = flat_rows(found["rows"], len(lead)), G
    for name, reference in expected.items():
        value = flat(found[name]) if name in ("gradient", "squared_sum", "power_sum", "rmatvec") else found[name]
        error = np.max(np.abs(np.asarray(value, float) - reference), initial=0.0)
        assert value.shape == reference.shape, name
        assert error <= tolerance * np.max(np.abs(reference)), f"{name}: {error}"


def outputs_of(case):
    z = jax.eval_shape(case.model, case.params, case.x)
    return z, jax.tree.leaves(z)[0].shape[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ZOO)
def test_statistics_equal_brute_force(name):
    """With two cotangents an example, which share the forward pass."""
    case = ZOO[name]()
    z, count = outputs_of(case)
    assert_all_equal(case, normal(z, 2), (2, count), 1e-10)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", REMATERIALISED)
def test_statistics_formed_in_the_backward_pass_equal_brute_force(name):
    """With one cotangent an example, statistics under `jax.checkpoint` are formed where the backward pass goes by."""
    case = ZOO[name]()
    z, count = outputs_of(case)
    rows = jax.eval_shape(lambda: ng.per_example(case.model, case.params, case.x, normal(z), check=False))
    assert any("in the backward pass" in p.statistics for p in rows.explain().parameters)
    assert_all_equal(case, normal(z), (count,), 1e-10)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["convnet", "odd"])
def test_a_small_budget_changes_nothing(name):
    """Every chunked path."""
    case = ZOO[name]()
    z, count = outputs_of(case)
    assert_all_equal(case, normal(z, 2), (2, count), 1e-10, budget=200)


@pytest.mark.sample(1)
@pytest.mark.float32
@pytest.mark.users_defaults
@pytest.mark.parametrize("name", ZOO)
def test_single_precision(name):
    with jax.default_matmul_precision("highest"):
        case = ZOO[name]()
        z, count = outputs_of(case)
        assert_all_equal(case, normal(z, 2), (2, count), 1e-5)


@pytest.mark.parametrize("name", ["convnet", "transformer_tied", "odd", "pinn"])
def test_everything_is_explained(name):
    """Every parameter is listed, with its uses; every site has a rule, and gradients that are formed have a reason."""
    case = ZOO[name]()
    z, _ = outputs_of(case)
    rows = jax.eval_shape(lambda: ng.per_example(case.model, case.params, case.x, normal(z), check=False))
    explanation = rows.explain()
    assert len(explanation.parameters) == len(jax.tree.leaves(case.params))
    for parameter in explanation.parameters:
        uses = sum(site.parameters.count(parameter.name) for site in explanation.sites)
        assert parameter.num_uses == uses
        assert parameter.name in str(explanation)
        assert bool(parameter.reason) == parameter.statistics.startswith(("gradients", "zero"))
    assert {site.rule for site in explanation.sites} <= {"dense", "convolution", "lookup", "local"}


def test_the_factors_of_a_weight_give_its_gradients():
    case = ZOO["convnet"]()
    z, count = outputs_of(case)
    cotangents = normal(z)
    factors = jax.jit(lambda: ng.per_example(case.model, case.params, case.x, cotangents, check=False).factors())()
    rows = jax.tree.leaves_with_path(gradients(case, cotangents))
    names = {"params" + jax.tree_util.keystr(path): row for path, row in rows}
    assert len(factors) == 4
    for name, (use,) in factors.items():
        norms = np.sum(np.einsum("ngtd,ngto->ngdo", use.inputs, use.cotangents) ** 2, axis=(1, 2, 3))
        np.testing.assert_allclose(norms, np.sum(names[name].reshape(count, -1) ** 2, axis=1), rtol=1e-10)


def test_cotangents_may_be_a_function_of_the_outputs():
    case = ZOO["mlp"]()
    given = lambda z: jnp.sin(3 * z)
    model, params, x = case.model, case.params, case.x
    sums = jax.jit(
        lambda: [ng.per_example(model, params, x, u).squared_sum() for u in (given, given(model(params, x)))]
    )
    for one, other in zip(*map(jax.tree.leaves, sums()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
