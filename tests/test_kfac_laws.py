"""What holds for every Kronecker-factored metric, whatever the model."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import as_matrix, distance, relative_errors
from brute_force import flat_rows, gradients
from helpers import flat
from hypothesis import given, settings
from hypothesis import strategies as st
from models import normal
from zoo import ZOO, affine, along, integers, libraries

import natgrad as ng

SQUARES = ng.Euclidean()
SOFTMAX = ng.Fisher(ng.Categorical())


def mlp():
    case = ZOO["mlp"]()
    model = lambda params, x: affine(jnp.tanh(affine(jnp.tanh(affine(x, **params[0])), **params[1])), **params[2])
    return model, case.params, normal(8, 30, 5)


def quiet(function):
    """Fallbacks are warned of, which is not the point here."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args, **kwargs)

    return wrapped


def metric(function, model, geometry, params, x, **options):
    """The metric, compiled whole."""
    return jax.jit(lambda p, x: function(model, geometry, p, x, **options))(params, x)


def dense(function, model, geometry, params, x, **options):
    """The metric as a matrix, compiled whole."""
    return np.asarray(jax.jit(lambda p, x: function(model, geometry, p, x, **options).as_matrix())(params, x))


@functools.partial(jax.jit, static_argnames="factored")
def preconditioned(K, damping, covector, factored=False):
    return K.inverse(damping, factored=factored).mv(covector)


# Against gradients that are formed.


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ZOO)
@quiet
def test_corrected_eigenvalues_are_nearest_and_keep_the_trace(name):
    """With exact backward passes, of all blocks at once; what is dense or of two is exact."""
    case = ZOO[name]()

    @jax.jit
    def found(params):
        batch = ng.Batch(case.x, in_axes=case.in_axes)
        K, Q = (f(case.model, SQUARES, params, batch) for f in (ng.kfac, ng.ekfac))
        columns = jax.vmap(SQUARES.factor, out_axes=1)(case.model(params, case.x))
        return K, Q, Q.trace(), gradients(case._replace(params=params), columns)

    K, Q, trace, rows = found(case.params)
    num_examples = jax.tree.leaves(rows)[0].shape[1]
    rows = flat_rows(rows, 2)
    exact = rows.T @ rows / num_examples
    np.testing.assert_allclose(trace, np.trace(exact), rtol=1e-10)
    assert distance(Q, exact) <= distance(K, exact) + 1e-12 * np.linalg.norm(exact)
    assert np.linalg.eigvalsh(as_matrix(K)).min() > -1e-10 * np.trace(exact)
    paths, errors = list(K.report()), iter(relative_errors(K, exact))
    for place in K.operator.places:
        own = [next(errors) for _ in range(place.block[0])]
        if K.report()[paths[place.parts[0].leaf]].structure in ("dense", "scale and shift"):
            assert max(own) < 1e-10


def test_corrected_equals_plain_where_plain_is_exact():
    model, params, x = mlp()
    K, Q = (dense(f, model, SOFTMAX, params, x[:1]) for f in (ng.kfac, ng.ekfac))
    np.testing.assert_allclose(Q, K, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_basis_may_be_given():
    model, params, x = mlp()
    K = metric(ng.kfac, model, SOFTMAX, params, x)
    Q = metric(ng.ekfac, model, SOFTMAX, params, x)
    expected = np.asarray(as_matrix(Q))
    based = jax.jit(lambda p, basis: ng.ekfac(model, SOFTMAX, p, x, basis=basis).as_matrix())
    for basis in (K, Q):
        np.testing.assert_allclose(based(params, basis), expected, rtol=1e-9, atol=1e-12)
    other = based(params, metric(ng.kfac, model, SQUARES, params, x[:7]))
    np.testing.assert_allclose(np.trace(other), np.trace(expected), rtol=1e-10)
    assert np.abs(other - expected).max() > 1e-4


# Scales, copies and limits.


@pytest.mark.slow
def test_scales_of_loss_and_batch():
    model, params, x = mlp()
    gradient = jax.tree.map(np.cos, params)
    K = metric(ng.kfac, model, SOFTMAX, params, x)
    scaled = metric(ng.kfac, model, 7.0 * SOFTMAX, params, x)
    repeated = metric(ng.kfac, model, SOFTMAX, params, np.concatenate([x, x, x]))
    np.testing.assert_allclose(as_matrix(repeated), as_matrix(K), rtol=1e-10, atol=1e-13)
    for factored in (False, True):
        step = preconditioned(K, 0.01, gradient, factored)
        seven = preconditioned(scaled, 0.07, jax.tree.map(lambda g: 7.0 * g, gradient), factored)
        np.testing.assert_allclose(flat(seven), flat(step), rtol=1e-10)


def test_much_damping_is_gradient_descent():
    model, params, x = mlp()
    gradient = jax.tree.map(np.cos, params)
    K = metric(ng.kfac, model, SOFTMAX, params, x)
    g, lam = flat(gradient), 1e9
    for factored in (False, True):
        step = flat(preconditioned(K, lam, gradient, factored))
        cosine = step @ g / np.linalg.norm(step) / np.linalg.norm(g)
        assert cosine > 1 - 1e-6
        np.testing.assert_allclose(np.linalg.norm(step), np.linalg.norm(g) / lam, rtol=1e-3 if factored else 1e-6)


def test_linear_regression_in_one_step():
    """With a bias; with a penalty, which adds to gradient and metric, the solution of ridge regression."""
    params, x, y = {"w": normal(1, 4, 2), "b": normal(2, 2)}, normal(3, 20, 4), normal(4, 20, 2)
    model = lambda params, x: affine(x, **params)

    def loss(p, penalty):
        squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p))
        return jnp.sum((model(p, x) - y) ** 2) / 40 + penalty / 2 * squares

    @functools.partial(jax.jit, static_argnames="penalty")  # without a penalty the inverse is another one
    def slope_after_step(params, penalty):
        gradient = lambda p: jax.grad(loss)(p, penalty)
        step = ng.kfac(model, SQUARES, params, x).inverse(penalty).mv(gradient(params))
        return gradient(jax.tree.map(lambda p, s: p - s, params, step))

    for penalty in (0.0, 0.3):
        assert np.max(np.abs(flat(slope_after_step(params, penalty)))) < 1e-10


@pytest.mark.slow
def test_undamped_steps_do_not_depend_on_affine_maps_of_units():
    """Inputs and hidden units in other coordinates: the function after a step is the same. A gradient step is not."""
    model, params, x = mlp()
    shift = lambda seed, size: 0.3 * normal(seed, size)
    spread = lambda seed, size: jnp.eye(size) + 0.3 * normal(seed, size, size)
    inwards, outwards, into = spread(11, 5), spread(12, 7), spread(13, 7)
    shifts = shift(14, 5), shift(15, 7), shift(16, 7)

    def other(params, x):
        """The same network, whose units see and say everything in other coordinates."""
        x = x @ inwards + shifts[0][None]
        pre = affine(x, **params[0]) @ outwards + shifts[1][None]
        hidden = jnp.tanh(pre) @ into + shifts[2][None]
        return affine(jnp.tanh(affine(hidden, **params[1])), **params[2])

    def moved(w, b, first, shift, second, offset):
        """Weights that do to the new coordinates what `w` and `b` do to the old ones."""
        w = np.linalg.inv(first) @ w @ second
        return {"w": w, "b": (b @ second) - shift @ w + offset}

    first, second, last = params
    back = np.linalg.inv(outwards)
    changed = [
        moved(first["w"], first["b"], inwards, shifts[0], back, -shifts[1] @ back),
        moved(second["w"], second["b"], into, shifts[2], jnp.eye(6), jnp.zeros(6)),
        last,
    ]
    labels = integers(17, 0, 3, 30)

    @functools.partial(jax.jit, static_argnums=0)
    def outputs(model, params):
        """Before a step, after a natural one, and after one along the gradient."""
        loss = lambda p: -jnp.mean(jax.nn.log_softmax(model(p, x))[jnp.arange(30), labels])
        gradient = jax.grad(loss)(params)
        natural = ng.kfac(model, SOFTMAX, params, x).inverse().mv(gradient)
        after = lambda step: model(jax.tree.map(lambda p, s: p - s, params, step), x)
        return model(params, x), after(natural), after(gradient)

    (before, mine, plain), (same_before, same, other_plain) = outputs(model, params), outputs(other, changed)
    np.testing.assert_allclose(same_before, before, rtol=1e-9, atol=1e-9)
    change = np.abs(mine - before).max()
    assert change > 0.1
    np.testing.assert_allclose(same, mine, atol=1e-8 * change)
    assert np.abs(other_plain - plain).max() > 1e-2


# Sampled cotangents.


def test_samples_are_unbiased_with_the_error_of_samples():
    params, x = {"w": normal(1, 3, 4), "b": normal(2, 4)}, normal(3, 2, 3)
    model = lambda params, x: affine(jnp.tanh(x), **params)
    exact = np.asarray(metric(ng.kfac, model, SOFTMAX, params, x).operator.blocks[0].B)
    sampled = lambda key, count: ng.kfac(model, SOFTMAX, params, x, key=key, num_samples=count).operator.blocks[0].B
    keys = jax.random.split(jax.random.key(0), 12)
    errors = []
    for count in (100, 10_000):
        draws = jax.jit(jax.vmap(lambda key, count=count: sampled(key, count)))(keys)
        errors.append(np.sqrt(np.mean(np.sum((draws - exact[None]) ** 2, axis=(1, 2, 3, 4))) / np.sum(exact**2)))
    assert errors[1] < 0.02
    assert abs(np.log10(errors[1] / errors[0]) / 2 + 0.5) < 0.1


# Uses.


@pytest.mark.compat
@pytest.mark.slow
def test_the_same_in_many_spellings():
    """Products, transposes, einsum, vmap, jit, checkpoint, casts: one metric."""
    params, x = {"w": normal(1, 4, 5), "b": normal(2, 5), "v": normal(3, 5, 3)}, normal(4, 6, 4)
    layer = lambda w, b, x: affine(x, w, b)
    spellings = {
        "product": lambda p, x: jnp.tanh(layer(p["w"], p["b"], x)) @ p["v"],
        "transposed": lambda p, x: jnp.tanh((p["w"].T @ x.T).T + along(p["b"], x)) @ p["v"],
        "einsum": lambda p, x: jnp.einsum(
            "oh,nh->no", p["v"].T, jnp.tanh(along(p["b"], x) + jnp.einsum("io,ni->no", p["w"], x))
        ),
        "mapped": jax.vmap(lambda p, x: jnp.tanh(p["w"].T @ x + p["b"]) @ p["v"], in_axes=(None, 0)),
        "jit": lambda p, x: jax.jit(lambda x: jnp.tanh(jax.jit(layer)(p["w"], p["b"], x)))(x) @ p["v"],
        "checkpoint": lambda p, x: jnp.tanh(jax.checkpoint(jnp.matmul)(x, p["w"]) + along(p["b"], x)) @ p["v"],
        "late bias": lambda p, x: (
            jnp.tanh((x @ p["w"]).reshape(-1, 1, 5).swapaxes(0, 1) + 0.0 * x[None, :, :1] + p["b"][None, None])[0]
            @ p["v"]
        ),
        "axes added": lambda p, x: jnp.tanh((x @ p["w"])[:, None] + p["b"][None, None])[:, 0] @ p["v"],
        "scaled": lambda p, x: jnp.tanh((-2.0 * x) @ (-0.5 * p["w"]) + along(p["b"], x)) @ p["v"],
    }
    found = {
        name: dense(ng.kfac, model, SOFTMAX, params, x, blocks=ng.BlockRules(strict=True))
        for name, model in spellings.items()
    }
    expected = found["product"]
    for name, matrix in found.items():
        assert np.abs(matrix - expected).max() < 1e-12 * np.abs(expected).max(), name


@pytest.mark.users_defaults
def test_half_precision_weights_give_nearly_the_same():
    params, x = {"w": normal(1, 4, 5), "v": normal(3, 5, 3)}, normal(4, 6, 4)
    half = lambda a: a.astype(jnp.bfloat16)
    model = lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"]
    cast = lambda p, x: jnp.tanh((half(x) @ half(p["w"])).astype(x.dtype)) @ p["v"]
    K, L = (dense(ng.kfac, m, SOFTMAX, params, x, blocks=ng.BlockRules(strict=True)) for m in (model, cast))
    assert np.linalg.norm(K - L) / np.linalg.norm(K) < 3e-2


@pytest.mark.compat
def test_stacked_layers_are_layers():
    """A scan over stacked weights has the factors of the layers written out."""
    stack = {"w": normal(1, 3, 4, 4), "b": normal(2, 3, 4)}
    x = normal(3, 6, 4)
    layer = lambda x, own: (jnp.tanh(affine(x, **own)), None)
    scanned = lambda params, x: jax.lax.scan(layer, x, params)[0]
    listed = [jax.tree.map(lambda leaf, k=k: leaf[k], stack) for k in range(3)]
    written = lambda params, x: functools.reduce(lambda x, own: layer(x, own)[0], params, x)
    K, L = (
        metric(ng.kfac, scanned, SQUARES, stack, x, blocks=ng.BlockRules(strict=True)),
        metric(ng.kfac, written, SQUARES, listed, x, blocks=ng.BlockRules(strict=True)),
    )
    for k, block in enumerate(L.operator.blocks):
        np.testing.assert_allclose(K.operator.blocks[0].A[k], block.A[0], rtol=1e-12)
        np.testing.assert_allclose(K.operator.blocks[0].B[k], block.B[0], rtol=1e-12, atol=1e-14)


def test_parts_of_a_fused_weight_are_the_weights():
    """Weights joined into one product have their own factors; parts of one weight too."""
    x = normal(3, 6, 4)
    params = {"q": normal(1, 4, 3), "k": normal(2, 4, 2), "b": normal(4, 2)}
    apart = lambda p, x: jnp.concatenate([jnp.tanh(x @ p["q"]), jnp.sin(x @ p["k"]) + along(p["b"], x)], axis=1)

    def fused(p, x):
        y = x @ jnp.concatenate([p["q"], p["k"]], axis=1)
        return jnp.concatenate([jnp.tanh(y[:, :3]), jnp.sin(y[:, 3:]) + along(p["b"], x)], axis=1)

    K, L = (dense(ng.kfac, m, SQUARES, params, x, blocks=ng.BlockRules(strict=True)) for m in (apart, fused))
    np.testing.assert_allclose(K, L, rtol=1e-12, atol=1e-14)


@pytest.mark.compat
def test_low_rank_corrections_have_factors():
    """W0 + A B, seen from each of the three, for one example: exact, in any order of writing."""
    params = {"W": normal(1, 5, 4), "A": normal(2, 5, 2), "B": normal(3, 2, 4), "b": normal(4, 4)}
    x = normal(5, 1, 5)
    upright = lambda p, x: jnp.tanh(affine(x, p["W"] + 0.5 * (p["A"] @ p["B"]), p["b"]))
    turned = lambda p, x: jnp.tanh(
        ((jnp.einsum("ro,ir->oi", p["B"], 0.5 * p["A"]) + p["W"].T) @ x.T).T + along(p["b"], x)
    )
    for model in (upright, turned):
        K = metric(ng.kfac, model, SQUARES, params, x, blocks=ng.BlockRules(strict=True))
        exact = dense(ng.pullback, model, SQUARES, params, x)
        assert max(relative_errors(K, exact)) < 1e-10
        assert K.report()["params['A']"].factors == ((5, 5), (2, 2))
        assert K.report()["params['b']"].shares == "params['W']"


@settings(max_examples=8)
@given(data=st.data())
@pytest.mark.slow
def test_any_einsum_is_a_layer(data):
    """Axes in any number and order: those of the weight alone are outputs, those it shares are inputs, or groups if the
    result has them too."""
    sizes = {axis: data.draw(st.integers(1, 3)) for axis in "abcdefgh"}
    positions, groups, inputs, outputs = "ab", "cd", "ef", "gh"
    kinds = [axes[: data.draw(st.integers(0, 2))] for axes in (positions, groups, inputs, outputs)]
    positions, groups, inputs, outputs = kinds
    order = lambda axes: "".join(data.draw(st.permutations(list(axes))))
    operand, weight, result = order(positions + groups + inputs), order(groups + inputs + outputs), ""
    result = order(positions + groups + outputs)
    spec = f"n{operand},{weight}->n{result}"
    shape = lambda axes: [sizes[axis] for axis in axes]
    params, x = {"w": normal(1, *shape(weight))}, normal(2, 2, *shape(operand))
    model = lambda p, x: jnp.tanh(jnp.einsum(spec, x, p["w"]))

    @jax.jit
    def found(params):
        K = ng.kfac(model, SQUARES, params, x[:1], blocks=ng.BlockRules(strict=True))
        exact = [ng.pullback(model, SQUARES, params, batch).as_matrix() for batch in (x[:1], x)]
        return K, exact, ng.ekfac(model, SQUARES, params, x).trace()

    K, exact, trace = found(params)
    np.testing.assert_allclose(trace, np.trace(exact[1]), rtol=1e-10)
    if weight:
        count = lambda axes: int(np.prod(shape(axes), dtype=int))
        assert K.operator.places[0].block == (count(groups), count(inputs), count(outputs)), spec
        if count(positions) == 1:
            assert max(relative_errors(K, exact[0])) < 1e-10


UNUSUAL = {
    "negative": lambda p, x: jnp.tanh(affine(x, -p["w"], p["b"])),
    "parametrised scale": lambda p, x: jnp.tanh(affine(x, p["s"] * p["w"], p["b"])),
    "scaled bias": lambda p, x: jnp.tanh(affine(x, p["w"], 2.0 * p["b"])),
    "subtracted bias": lambda p, x: jnp.tanh(x @ p["w"] - along(p["b"], x)),
    "bias by entries": lambda p, x: jnp.tanh(affine(x, p["w"], jnp.arange(1.0, 5.0) * p["b"])),
    "bias twice": lambda p, x: jnp.tanh(affine(x, p["w"], p["b"]) + along(p["b"], x)),
    "two biases": lambda p, x: jnp.tanh(affine(x, p["w"], p["b"]) + along(p["c"], x)),
    "seen before its bias": lambda p, x: x @ p["w"] + jnp.tanh(affine(x, p["w"], p["b"])),
    "through both signs": lambda p, x: jnp.tanh(x @ (p["A"] @ p["B"]) + jnp.sin(x) @ (-(p["A"] @ p["B"]))),
    "fused": lambda p, x: jnp.tanh(
        affine(x, jnp.concatenate([p["w"], p["v"]], axis=1), jnp.concatenate([p["b"], p["c"]]))
    ),
    "padded": lambda p, x: jnp.tanh(x @ jax.lax.pad(p["w"], 0.0, ((0, 0, 0), (1, 0, 0)))),
    "empty": lambda p, x: jnp.tanh(x @ p["w"]) + jnp.sum(p["none"]),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", UNUSUAL)
@quiet
def test_unusual_uses_are_exact_for_one_example(name):
    """And corrected eigenvalues keep the trace for several."""
    model = UNUSUAL[name]
    params = {"w": normal(1, 3, 4), "v": normal(2, 3, 4), "b": normal(3, 4), "c": normal(4, 4), "s": normal(5)}
    params |= {"A": normal(6, 3, 2), "B": normal(7, 2, 4), "none": jnp.zeros((0, 2))}
    x = normal(8, 4, 3)

    @jax.jit
    def found(params):
        K = ng.kfac(model, SQUARES, params, x[:1])
        exact = [ng.pullback(model, SQUARES, params, data).as_matrix() for data in (x[:1], x)]
        return K, exact, ng.ekfac(model, SQUARES, params, x).trace()

    K, exact, trace = found(params)
    errors = relative_errors(K, exact[0])
    # Two uses of one weight by one example are two terms, whose products with each other are left out.
    assert max(errors) < 1e-10 or name in ("seen before its bias", "through both signs")
    np.testing.assert_allclose(trace, np.trace(exact[1]), rtol=1e-10)


@pytest.mark.compat
def test_a_branch_not_taken_has_no_inputs():
    """Examples that go another way do not count, so that one that does not is enough for an exact block."""
    branch = lambda row, p: jax.lax.cond(row[0] > 0, lambda r: jnp.tanh((3 * r) @ p), lambda r: r[:2], row)
    model = lambda p, x: jax.lax.map(lambda row: branch(row, p), x)
    params, x = normal(1, 3, 2), jnp.array([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]])
    K = metric(ng.kfac, model, SQUARES, params, x)
    np.testing.assert_allclose(K.operator.blocks[0].A[0, 0], np.diag([9.0, 0.0, 0.0]), atol=1e-14)
    np.testing.assert_allclose(as_matrix(K), dense(ng.pullback, model, SQUARES, params, x), atol=1e-12)


@pytest.mark.slow
@pytest.mark.users_defaults
def test_norms_of_groups_and_of_batches_are_scale_and_shift():
    """That of a batch in inference mode, with its state as it is."""
    from flax import linen as nn

    x = normal(1, 3, 5, 4)
    for network in (nn.GroupNorm(num_groups=2), nn.BatchNorm(use_running_average=True)):
        variables = network.init(jax.random.key(0), x)
        params = jax.tree.map(lambda p: p + 0.5, variables.pop("params"))
        model = lambda p, x, network=network, rest=variables: network.apply({"params": p, **rest}, x)
        K = metric(ng.kfac, model, SQUARES, params, x, blocks=ng.BlockRules(strict=True))
        assert {row.structure for row in K.report().values()} == {"scale and shift"}
        assert max(relative_errors(K, dense(ng.pullback, model, SQUARES, params, x))) < 1e-6


@pytest.mark.slow
@pytest.mark.users_defaults
def test_the_same_in_every_library():
    """A perceptron with one hidden layer, with the same weights."""
    models, x = libraries()
    found = {}
    for name, (model, params) in models.items():
        blocks = metric(ng.kfac, model, SOFTMAX, params, x, blocks=ng.BlockRules(strict=True)).operator.blocks
        found[name] = sorted(blocks, key=lambda block: block.B.shape[-1])
    for name, blocks in found.items():
        for mine, plain in zip(blocks, found["plain"], strict=True):
            np.testing.assert_allclose(mine.A, plain.A, rtol=1e-12, atol=1e-14, err_msg=name)
            np.testing.assert_allclose(mine.B, plain.B, rtol=1e-12, atol=1e-14, err_msg=name)


def test_two_uses_are_twice_the_positions():
    """The same layer on two halves of the input, written twice or once; and one example on independent paths."""
    params, x = {"w": normal(1, 3, 3), "b": normal(2, 3)}, normal(3, 5, 2, 3)
    once = lambda p, x: jnp.tanh(affine(x, **p))
    twice = lambda p, x: jnp.stack([jnp.tanh(affine(x[:, k], **p)) for k in range(2)], axis=1)
    for sharing in ("expand", "reduce"):
        K, L = (
            dense(ng.kfac, m, SQUARES, params, x, blocks=ng.BlockRules(sharing=sharing, strict=True))
            for m in (once, twice)
        )
        np.testing.assert_allclose(L, K, rtol=1e-12, atol=1e-14)
    paths = lambda p, x: jnp.concatenate([affine(x[:, 0], **p), affine(x[:, 0], **p)], axis=1)
    exact = dense(ng.pullback, paths, SQUARES, params, x[:1])
    assert max(relative_errors(metric(ng.kfac, paths, SQUARES, params, x[:1]), exact)) < 1e-10


def test_a_bias_at_some_uses_only():
    """The one that stands for the bias is zero where the weight is used without it."""
    params, x = {"w": normal(1, 3, 3), "b": normal(2, 3)}, normal(3, 5, 3)
    model = lambda p, x: jnp.tanh(affine(x, **p)) @ p["w"]
    K = metric(ng.kfac, model, SQUARES, params, x, blocks=ng.BlockRules(strict=True))
    x, w, b = map(np.asarray, (x, params["w"], params["b"]))
    a = np.concatenate([x, np.tanh(x @ w + b)])
    ones = np.repeat([1.0, 0.0], 5)[:, None]
    joined = np.concatenate([a, ones], axis=1)
    np.testing.assert_allclose(K.operator.blocks[0].A[0, 0], joined.T @ joined / 10, rtol=1e-12)


@pytest.mark.compat
def test_embeddings_are_dense_layers_of_one_hot_rows():
    params, tokens = {"table": normal(1, 6, 3), "v": normal(2, 3, 2)}, integers(3, 0, 4, 5, 4)
    looked = lambda p, t: jnp.tanh(p["table"][t]) @ p["v"]
    hot = lambda p, t: jnp.tanh(jax.nn.one_hot(t, 6, dtype=float) @ p["table"]) @ p["v"]
    K, L = (metric(ng.kfac, m, SQUARES, params, tokens, blocks=ng.BlockRules(strict=True)) for m in (looked, hot))
    np.testing.assert_allclose(as_matrix(K), as_matrix(L), rtol=1e-12, atol=1e-14)
    assert K.report()["params['table']"].factors == ((6, 1, 1), (3, 3))
    # Rows that are never read have no gradient, and no step.
    read = np.repeat(np.arange(6) < 4, 3).reshape(6, 3).astype(float)
    step = preconditioned(K, 0.1, {"table": read, "v": params["v"]}, factored=True)
    assert not np.any(step["table"][4:]) and np.all(np.isfinite(step["table"]))


@pytest.mark.compat
def test_tied_tables_have_the_partial_traces_of_both_uses():
    params, tokens = {"table": normal(1, 6, 3)}, integers(2, 0, 6, 4, 5)
    model = lambda p, t: jnp.tanh(p["table"][t]) @ p["table"].T
    apart = lambda p, t: jnp.tanh(p["in"][t]) @ p["out"].T
    K = dense(ng.kfac, model, SQUARES, params, tokens, blocks=ng.BlockRules(strict=True)).reshape(6, 3, 6, 3)
    both = {"in": params["table"], "out": params["table"]}
    L = dense(ng.kfac, apart, SQUARES, both, tokens, blocks=ng.BlockRules(strict=True))
    total = (L[:18, :18] + L[18:, 18:]).reshape(6, 3, 6, 3)
    for axes in ((0, 2), (1, 3)):
        np.testing.assert_allclose(
            np.trace(K, axis1=axes[0], axis2=axes[1]), np.trace(total, axis1=axes[0], axis2=axes[1])
        )


@pytest.mark.compat
def test_scale_and_shift_are_exact_unit_by_unit():
    params = {"scale": normal(1, 4), "shift": normal(2, 4), "v": normal(3, 4, 2)}
    model = lambda p, x: jnp.tanh(x * along(p["scale"], x) + along(p["shift"], x)) @ p["v"]
    x = normal(4, 6, 5, 4)
    K = metric(ng.kfac, model, SQUARES, params, x, blocks=ng.BlockRules(strict=True))
    exact = dense(ng.pullback, model, SQUARES, params, x)
    row = K.report()["params['scale']"]
    assert row.structure == "scale and shift" and row.factors == ((4, 2, 2),)
    assert max(relative_errors(K, exact)[:4]) < 1e-10


# Masks.


@pytest.mark.sample(3)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("function", [ng.kfac, ng.ekfac])
def test_padding_changes_nothing(sharing, function):
    """Garbage at padded positions, for a loss at every position and through a loop over time, is as if it were not
    there. The one that stands for the bias is masked too."""
    params = {"w": normal(1, 3, 4), "b": normal(2, 4), "v": normal(3, 4, 2)}
    model = lambda p, x: jnp.tanh(affine(x, p["w"], p["b"])) @ p["v"]
    x, lengths = normal(4, 3, 5, 3), np.array([5, 2, 3])
    mask = np.arange(5)[None] < lengths[:, None]
    masked = jax.jit(
        lambda p, x: function(
            model, SQUARES, p, ng.Batch(x, mask=mask), blocks=ng.BlockRules(sharing=sharing)
        ).as_matrix()
    )
    found = [masked(params, np.where(mask[..., None], x, garbage)) for garbage in (0.0, 77.0)]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12)
    if sharing == "expand" and function is ng.kfac:
        K = metric(function, model, SQUARES, params, ng.Batch(x, mask=mask))
        unpadded = metric(function, model, SQUARES, params, np.asarray(x)[mask])
        for mine, theirs in zip(K.operator.blocks, unpadded.operator.blocks, strict=True):
            np.testing.assert_allclose(mine.A, theirs.A, rtol=1e-12)
            # Sums over positions, divided by examples: 10 positions in 3 examples.
            np.testing.assert_allclose(mine.B, theirs.B * 10 / 3, rtol=1e-12, atol=1e-14)


def test_masks_of_images_and_of_single_positions():
    params = {"w": normal(1, 3, 4), "b": normal(2, 4)}
    model = lambda p, x: jnp.tanh(affine(x, **p))
    x, mask = normal(3, 3, 2, 5, 3), integers(4, 0, 2, 3, 2, 5)
    masked = jax.jit(lambda p, x: ng.kfac(model, SQUARES, p, ng.Batch(x, mask=mask)).as_matrix())
    found = [masked(params, np.where(np.asarray(mask)[..., None] == 1, x, garbage)) for garbage in (0.0, 5.0)]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12)
    turned = lambda p, x: model(p, jnp.swapaxes(x, 1, 2))
    with pytest.raises(ValueError, match="is used nowhere"):
        ng.kfac(turned, SQUARES, params, ng.Batch(x, mask={"params": mask}))
    masked = jax.jit(lambda p, x: ng.kfac(model, SQUARES, p, ng.Batch(x, mask=np.array([[1], [0]]))).as_matrix())
    single = [masked(params, np.stack([np.asarray(x)[0, :1, 0], np.full((1, 3), g)])) for g in (0.0, 7.0)]
    np.testing.assert_allclose(single[0], single[1], rtol=1e-12)


@pytest.mark.compat
def test_masks_over_time_and_by_path():
    params = {"in": normal(1, 3, 4), "state": normal(2, 4, 4), "out": normal(3, 4, 2)}

    def model(p, x):
        def cell(h, inputs):
            h = jnp.tanh(inputs @ p["in"] + h @ p["state"])
            return h, h

        states = jax.lax.scan(cell, jnp.zeros((x.shape[0], 4)), jnp.swapaxes(x, 0, 1))[1]
        return jnp.swapaxes(states, 0, 1) @ p["out"]

    x = normal(4, 3, 5, 3)
    mask = np.arange(5)[None] < np.array([5, 2, 3])[:, None]
    masked = jax.jit(lambda p, x: ng.kfac(model, SQUARES, p, ng.Batch(x, mask=mask)).as_matrix())
    found = [masked(params, np.where(mask[..., None], x, garbage)) for garbage in (0.0, 9.0)]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12)
    by_path = dense(ng.kfac, model, SQUARES, params, ng.Batch(x, mask={"params": mask, "z": mask}))
    np.testing.assert_allclose(by_path, found[0], rtol=1e-12)


# Under transformations, and over batches.


def test_running_averages_are_debiased():
    model, params, x = mlp()
    of_batch = jax.jit(lambda batch: ng.kfac(model, SOFTMAX, params, batch))
    batches = np.asarray(x).reshape(3, 10, -1)
    metrics = [of_batch(batch) for batch in batches]
    average = ng.RunningAverage(0.8)
    update, value = jax.jit(average.update), jax.jit(average.value)
    state = update(average.init(metrics[0]), metrics[0])
    np.testing.assert_allclose(as_matrix(value(state)), as_matrix(metrics[0]), rtol=1e-12)
    for K in metrics[1:]:
        state = update(state, K)
    A = lambda K: np.asarray(K.operator.blocks[0].A)
    expected = (0.64 * A(metrics[0]) + 0.8 * A(metrics[1]) + A(metrics[2])) / (0.64 + 0.8 + 1)
    np.testing.assert_allclose(A(value(state)), expected, rtol=1e-12)

    @jax.jit
    def plain(params, batches):
        average = ng.RunningAverage(1.0)
        update = lambda state, batch: (average.update(state, ng.kfac(model, SOFTMAX, params, batch)), None)
        start = average.init(jax.eval_shape(lambda: ng.kfac(model, SOFTMAX, params, batches[0])))
        return average.value(jax.lax.scan(update, start, batches)[0])

    whole = of_batch(x)
    burned_in = plain(params, batches)
    np.testing.assert_allclose(A(burned_in), A(whole), rtol=1e-12)
    batched = ng.accumulate(of_batch, [x[:20], x[20:]], progress=False)
    np.testing.assert_allclose(A(batched), A(whole), rtol=1e-12)
    np.testing.assert_allclose(batched.num_examples, 30)


def test_one_compilation_for_many_batches():
    model, params, x = mlp()
    traces = []

    @jax.jit
    def step(params, x, key):
        traces.append(None)
        K = ng.kfac(model, SOFTMAX, params, x, key=key)
        return K.inverse(0.1, factored=True).mv(params)

    for seed in range(3):
        step(params, x + seed, jax.random.key(seed))
    assert len(traces) == 1


@pytest.mark.slow
def test_a_small_budget_gives_the_same():
    case = ZOO["convnet"]()
    wide, narrow = (
        ng.ekfac(ng.evaluate(case.model, SQUARES, case.params, case.x, budget=budget)).as_matrix()
        for budget in (2**26, 2**12)
    )
    np.testing.assert_allclose(narrow, wide, rtol=1e-9, atol=1e-9 * np.abs(wide).max())


# Structure.


def test_oversized_factors_shrink_on_their_side_only():
    params, x = {"w": normal(1, 6, 4)}, normal(2, 5, 6)
    model = lambda p, x: jnp.tanh(x @ p["w"])
    whole = metric(ng.kfac, model, SQUARES, params, x).operator.blocks[0]
    with pytest.warns(UserWarning, match="6 inputs are more than `max_factor=4`: diagonal"):
        K = metric(ng.kfac, model, SQUARES, params, x, blocks=ng.BlockRules(max_factor=4))
    np.testing.assert_allclose(K.operator.blocks[0].A[0, :, 0, 0], np.diagonal(whole.A[0, 0]), rtol=1e-12)
    np.testing.assert_allclose(K.operator.blocks[0].B, whole.B, rtol=1e-12)
    with pytest.warns(UserWarning, match="blocks of 3"):
        K = metric(ng.kfac, model, SQUARES, params, x, blocks=ng.BlockRules(max_factor=4, oversized="blocked"))
    np.testing.assert_allclose(K.operator.blocks[0].A[0, 1], whole.A[0, 0, 3:, 3:], rtol=1e-12)


@pytest.mark.slow
def test_structures_can_be_chosen():
    model, params, x = mlp()
    exact = dense(ng.pullback, model, SOFTMAX, params, x)
    structures = {"params[0]": "dense", "params[1]": "diagonal", "params[1]['w']": "kronecker"}
    K = metric(ng.kfac, model, SOFTMAX, params, x, blocks=ng.BlockRules(structures=structures, strict=True))
    report = K.report()
    assert [report[f"params[{k}]['{n}']"].structure for k in range(3) for n in "wb"] == [
        "dense",
        "dense",
        "kronecker",
        "diagonal",
        "kronecker",
        "kronecker",
    ]
    corrected, plain = jax.eval_shape(
        lambda p, x: (
            ng.kfac(model, SOFTMAX, p, x, blocks=ng.BlockRules(structures={"params[2]": "eigenvalue-corrected"})),
            ng.ekfac(model, SOFTMAX, p, x, blocks=ng.BlockRules(structures={"params[2]": "kronecker"})),
        ),
        params,
        x,
    )
    rows = [{path: row.structure for path, row in K.report().items()} for K in (corrected, plain)]
    assert rows[0]["params[2]['w']"] == rows[1]["params[1]['w']"] == "eigenvalue-corrected"
    assert rows[0]["params[1]['w']"] == rows[1]["params[2]['w']"] == "kronecker"
    matrix = np.asarray(as_matrix(K))
    np.testing.assert_allclose(matrix[:7, :7], exact[:7, :7], rtol=1e-10)
    np.testing.assert_allclose(np.diagonal(matrix)[42:48], np.diagonal(exact)[42:48], rtol=1e-10)


def test_storage_of_ten_layers_of_a_thousand_units():
    """Two factors of a thousand squared each: twenty million numbers for ten million parameters."""
    struct = jax.ShapeDtypeStruct((1000, 1000), jnp.float32)
    model = lambda params, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), params, x)
    x = jax.ShapeDtypeStruct((8, 1000), jnp.float32)
    K = jax.eval_shape(lambda p, x: ng.kfac(model, SQUARES, p, x, key=jax.random.key(0)), [struct] * 10, x)
    report = K.report()
    assert report.numbers == 20_000_000
    assert "20,000,000 numbers, 80 MB" in str(report)
    assert len(report) == 10 and all(row.structure == "kronecker" for row in report.values())


def test_a_case_with_everything_covers_every_parameter():
    case = ZOO["odd"]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        K = jax.eval_shape(lambda p, x: ng.kfac(case.model, SQUARES, p, x), case.params, case.x)
    report = K.report()
    assert list(report) == [f"params['{name}']" for name in sorted(case.params)]
    assert report["params['unused']"].structure == "zero" and report["params['unused']"].reason
    covered = sum(np.prod(place.block) for place in K.operator.places)
    assert covered == K.in_size()
