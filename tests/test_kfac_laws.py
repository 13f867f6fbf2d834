"""What holds for every Kronecker-factored metric, whatever the model."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import distance, relative_errors
from brute_force import flat_rows, gradients
from helpers import ravel
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


def dense(function, model, geometry, params, x, **options):
    """The metric as a matrix, compiled whole."""
    return np.asarray(jax.jit(lambda p, x: function(model, geometry, p, x, **options).as_matrix())(params, x))


# Against gradients that are formed.


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ZOO)
@quiet
def test_corrected_eigenvalues_are_nearest_and_keep_the_trace(name):
    """With exact backward passes, of all blocks at once; what is dense or of two is exact."""
    case = ZOO[name]()
    z = case.model(case.params, case.x)
    columns = jax.vmap(SQUARES.factor, out_axes=1)(z)
    rows = flat_rows(gradients(case, columns), 2)
    exact = rows.T @ rows / jax.tree.leaves(z)[0].shape[0]
    K, Q = jax.jit(
        lambda p: [f(case.model, SQUARES, p, ng.Batch(case.x, in_axes=case.in_axes)) for f in (ng.kfac, ng.ekfac)]
    )(case.params)
    np.testing.assert_allclose(Q.trace(), np.trace(exact), rtol=1e-10)
    assert distance(Q, exact) <= distance(K, exact) + 1e-12 * np.linalg.norm(exact)
    assert np.linalg.eigvalsh(K.as_matrix()).min() > -1e-10 * np.trace(exact)
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
    K = ng.kfac(model, SOFTMAX, params, x)
    Q = ng.ekfac(model, SOFTMAX, params, x)
    for basis in (K, Q):
        again = ng.ekfac(model, SOFTMAX, params, x, basis=basis)
        np.testing.assert_allclose(again.as_matrix(), Q.as_matrix(), rtol=1e-9, atol=1e-12)
    other = ng.ekfac(model, SOFTMAX, params, x, basis=ng.kfac(model, SQUARES, params, x[:7]))
    np.testing.assert_allclose(other.trace(), Q.trace(), rtol=1e-10)
    assert np.abs(other.as_matrix() - Q.as_matrix()).max() > 1e-4


# Scales, copies and limits.


@pytest.mark.slow
def test_scales_of_loss_and_batch():
    model, params, x = mlp()
    gradient = jax.tree.map(jnp.cos, params)
    K = ng.kfac(model, SOFTMAX, params, x)
    scaled = ng.kfac(model, 7.0 * SOFTMAX, params, x)
    repeated = ng.kfac(model, SOFTMAX, params, jnp.concatenate([x, x, x]))
    np.testing.assert_allclose(repeated.as_matrix(), K.as_matrix(), rtol=1e-10, atol=1e-13)
    for factored in (False, True):
        step = ravel(K.inverse(0.01, factored=factored).mv(gradient))
        seven = scaled.inverse(0.07, factored=factored).mv(jax.tree.map(lambda g: 7.0 * g, gradient))
        np.testing.assert_allclose(ravel(seven), step, rtol=1e-10)


def test_much_damping_is_gradient_descent():
    model, params, x = mlp()
    gradient = jax.tree.map(jnp.cos, params)
    K = ng.kfac(model, SOFTMAX, params, x)
    g, lam = ravel(gradient), 1e9
    for factored in (False, True):
        step = ravel(K.inverse(lam, factored=factored).mv(gradient))
        cosine = step @ g / np.linalg.norm(step) / np.linalg.norm(g)
        assert cosine > 1 - 1e-6
        np.testing.assert_allclose(np.linalg.norm(step), np.linalg.norm(g) / lam, rtol=1e-3 if factored else 1e-6)


def test_linear_regression_in_one_step():
    """With a bias; with a penalty, which adds to gradient and metric, the solution of ridge regression."""
    params, x, y = {"w": normal(1, 4, 2), "b": normal(2, 2)}, normal(3, 20, 4), normal(4, 20, 2)
    model = lambda params, x: affine(x, **params)
    K = ng.kfac(model, SQUARES, params, x)
    for penalty in (0.0, 0.3):
        loss = lambda p, penalty=penalty: (
            jnp.sum((model(p, x) - y) ** 2) / 40 + penalty / 2 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p))
        )
        step = K.inverse(penalty).mv(jax.grad(loss)(params))
        new = jax.tree.map(lambda p, s: p - s, params, step)
        assert max(np.abs(ravel(jax.grad(loss)(new)))) < 1e-10


@pytest.mark.slow
def test_undamped_steps_do_not_depend_on_affine_maps_of_units():
    """Inputs and hidden units in other coordinates: the function after a step is the same. A gradient step is not."""
    model, params, x = mlp()
    shift = lambda seed, size: 0.3 * normal(seed, size)
    spread = lambda seed, size: jnp.eye(size) + 0.3 * normal(seed, size, size)
    before, after, into = spread(11, 5), spread(12, 7), spread(13, 7)
    shifts = shift(14, 5), shift(15, 7), shift(16, 7)

    def other(params, x):
        """The same network, whose units see and say everything in other coordinates."""
        x = x @ before + shifts[0][None]
        pre = affine(x, **params[0]) @ after + shifts[1][None]
        hidden = jnp.tanh(pre) @ into + shifts[2][None]
        return affine(jnp.tanh(affine(hidden, **params[1])), **params[2])

    def moved(w, b, first, shift, second, offset):
        """Weights that do to the new coordinates what `w` and `b` do to the old ones."""
        w = jnp.linalg.inv(first) @ w @ second
        return {"w": w, "b": (b @ second) - shift @ w + offset}

    first, second, last = params
    back = jnp.linalg.inv(after)
    changed = [
        moved(first["w"], first["b"], before, shifts[0], back, -shifts[1] @ back),
        moved(second["w"], second["b"], into, shifts[2], jnp.eye(6), jnp.zeros(6)),
        last,
    ]
    np.testing.assert_allclose(other(changed, x), model(params, x), rtol=1e-9, atol=1e-9)
    labels = integers(17, 0, 3, 30)

    def after_step(model, params, step_of):
        loss = lambda p: -jnp.mean(jax.nn.log_softmax(model(p, x))[jnp.arange(30), labels])
        step = step_of(model, params, jax.grad(loss)(params))
        return model(jax.tree.map(lambda p, s: p - s, params, step), x)

    natural = lambda model, params, g: ng.kfac(model, SOFTMAX, params, x).inverse().mv(g)
    plain = lambda model, params, g: g
    same, mine = after_step(other, changed, natural), after_step(model, params, natural)
    change = np.abs(mine - model(params, x)).max()
    assert change > 0.1
    np.testing.assert_allclose(same, mine, atol=1e-8 * change)
    assert np.abs(after_step(other, changed, plain) - after_step(model, params, plain)).max() > 1e-2


# Sampled cotangents.


def test_samples_are_unbiased_with_the_error_of_samples():
    params, x = {"w": normal(1, 3, 4), "b": normal(2, 4)}, normal(3, 2, 3)
    model = lambda params, x: affine(jnp.tanh(x), **params)
    exact = ng.kfac(model, SOFTMAX, params, x).operator.blocks[0].G
    sampled = lambda key, count: ng.kfac(model, SOFTMAX, params, x, key=key, num_samples=count).operator.blocks[0].G
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
        ng.kfac(scanned, SQUARES, stack, x, blocks=ng.BlockRules(strict=True)),
        ng.kfac(written, SQUARES, listed, x, blocks=ng.BlockRules(strict=True)),
    )
    for k, block in enumerate(L.operator.blocks):
        np.testing.assert_allclose(K.operator.blocks[0].A[k], block.A[0], rtol=1e-12)
        np.testing.assert_allclose(K.operator.blocks[0].G[k], block.G[0], rtol=1e-12, atol=1e-14)


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
        K = ng.kfac(model, SQUARES, params, x, blocks=ng.BlockRules(strict=True))
        exact = jax.jit(lambda p, model=model: ng.pullback(model, SQUARES, p, x).as_matrix())(params)
        assert max(relative_errors(K, exact)) < 1e-10
        assert K.report()["params['A']"].factors == ((5, 5), (2, 2))
        assert K.report()["params['b']"].shares == "params['W']"


@settings(max_examples=8, deadline=None, derandomize=True)
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
    x = jnp.array([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]])
    K = ng.kfac(model, SQUARES, normal(1, 3, 2), x)
    np.testing.assert_allclose(K.operator.blocks[0].A[0, 0], np.diag([9.0, 0.0, 0.0]), atol=1e-14)
    exact = ng.pullback(model, SQUARES, normal(1, 3, 2), x).as_matrix()
    np.testing.assert_allclose(K.as_matrix(), exact, atol=1e-12)


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
        K = ng.kfac(model, SQUARES, params, x, blocks=ng.BlockRules(strict=True))
        assert {row.structure for row in K.report().values()} == {"scale and shift"}
        assert max(relative_errors(K, ng.pullback(model, SQUARES, params, x).as_matrix())) < 1e-6


@pytest.mark.slow
@pytest.mark.users_defaults
def test_the_same_in_every_library():
    """A perceptron with one hidden layer, with the same weights."""
    models, x = libraries()
    found = {}
    for name, (model, params) in models.items():
        blocks = ng.kfac(model, SOFTMAX, params, x, blocks=ng.BlockRules(strict=True)).operator.blocks
        found[name] = sorted(blocks, key=lambda block: block.G.shape[-1])
    for name, blocks in found.items():
        for mine, plain in zip(blocks, found["plain"], strict=True):
            np.testing.assert_allclose(mine.A, plain.A, rtol=1e-12, atol=1e-14, err_msg=name)
            np.testing.assert_allclose(mine.G, plain.G, rtol=1e-12, atol=1e-14, err_msg=name)


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
    exact = jax.jit(lambda p: ng.pullback(paths, SQUARES, p, x[:1]).as_matrix())(params)
    assert max(relative_errors(ng.kfac(paths, SQUARES, params, x[:1]), exact)) < 1e-10


def test_a_bias_at_some_uses_only():
    """The one that stands for the bias is zero where the weight is used without it."""
    params, x = {"w": normal(1, 3, 3), "b": normal(2, 3)}, normal(3, 5, 3)
    model = lambda p, x: jnp.tanh(affine(x, **p)) @ p["w"]
    K = ng.kfac(model, SQUARES, params, x, blocks=ng.BlockRules(strict=True))
    a = np.concatenate([np.asarray(x), np.tanh(np.asarray(affine(x, **params)))])
    ones = np.repeat([1.0, 0.0], 5)[:, None]
    joined = np.concatenate([a, ones], axis=1)
    np.testing.assert_allclose(K.operator.blocks[0].A[0, 0], joined.T @ joined / 10, rtol=1e-12)


@pytest.mark.compat
def test_embeddings_are_dense_layers_of_one_hot_rows():
    params, tokens = {"table": normal(1, 6, 3), "v": normal(2, 3, 2)}, integers(3, 0, 4, 5, 4)
    looked = lambda p, t: jnp.tanh(p["table"][t]) @ p["v"]
    hot = lambda p, t: jnp.tanh(jax.nn.one_hot(t, 6, dtype=float) @ p["table"]) @ p["v"]
    K, L = (ng.kfac(m, SQUARES, params, tokens, blocks=ng.BlockRules(strict=True)) for m in (looked, hot))
    np.testing.assert_allclose(K.as_matrix(), L.as_matrix(), rtol=1e-12, atol=1e-14)
    assert K.report()["params['table']"].factors == ((6, 1, 1), (3, 3))
    # Rows that are never read have no gradient, and no step.
    step = K.inverse(0.1, factored=True).mv({"table": jnp.zeros((6, 3)).at[:4].set(1.0), "v": params["v"]})
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
    K = ng.kfac(model, SQUARES, params, x, blocks=ng.BlockRules(strict=True))
    exact = jax.jit(lambda p: ng.pullback(model, SQUARES, p, x).as_matrix())(params)
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
    found = [
        dense(
            function,
            model,
            SQUARES,
            params,
            ng.Batch(jnp.where(mask[..., None], x, garbage), mask=mask),
            blocks=ng.BlockRules(sharing=sharing),
        )
        for garbage in (0.0, 77.0)
    ]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12)
    if sharing == "expand" and function is ng.kfac:
        flat = x[mask]
        K = ng.kfac(model, SQUARES, params, jnp.asarray(flat))
        for mine, theirs in zip(
            function(model, SQUARES, params, ng.Batch(x, mask=mask)).operator.blocks, K.operator.blocks, strict=True
        ):
            np.testing.assert_allclose(mine.A, theirs.A, rtol=1e-12)
            # Sums over positions, divided by examples: 10 positions in 3 examples.
            np.testing.assert_allclose(mine.G, theirs.G * 10 / 3, rtol=1e-12, atol=1e-14)


def test_masks_of_images_and_of_single_positions():
    params = {"w": normal(1, 3, 4), "b": normal(2, 4)}
    model = lambda p, x: jnp.tanh(affine(x, **p))
    x, mask = normal(3, 3, 2, 5, 3), integers(4, 0, 2, 3, 2, 5)
    found = [
        dense(ng.kfac, model, SQUARES, params, ng.Batch(jnp.where(mask[..., None] == 1, x, garbage), mask=mask))
        for garbage in (0.0, 5.0)
    ]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12)
    turned = lambda p, x: model(p, jnp.swapaxes(x, 1, 2))
    with pytest.raises(ValueError, match="is used nowhere"):
        ng.kfac(turned, SQUARES, params, ng.Batch(x, mask={"params": mask}))
    pairs = [jnp.stack([x[0, :1, 0], jnp.full((1, 3), garbage)]) for garbage in (0.0, 7.0)]
    single = [dense(ng.kfac, model, SQUARES, params, ng.Batch(pair, mask=np.array([[1], [0]]))) for pair in pairs]
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
    found = [
        dense(ng.kfac, model, SQUARES, params, ng.Batch(jnp.where(mask[..., None], x, garbage), mask=mask))
        for garbage in (0.0, 9.0)
    ]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12)
    by_path = dense(ng.kfac, model, SQUARES, params, ng.Batch(x, mask={"params": mask, "z": mask}))
    np.testing.assert_allclose(by_path, found[0], rtol=1e-12)


# Under transformations, and over batches.


def test_running_averages_are_debiased():
    model, params, x = mlp()
    batches = [x[:10], x[10:20], x[20:]]
    metrics = [ng.kfac(model, SOFTMAX, params, batch) for batch in batches]
    average = ng.RunningAverage(0.8)
    state = average.update(average.init(metrics[0]), metrics[0])
    np.testing.assert_allclose(average.value(state).as_matrix(), metrics[0].as_matrix(), rtol=1e-12)
    for K in metrics[1:]:
        state = average.update(state, K)
    A = lambda K: K.operator.blocks[0].A
    expected = (0.64 * A(metrics[0]) + 0.8 * A(metrics[1]) + A(metrics[2])) / (0.64 + 0.8 + 1)
    np.testing.assert_allclose(A(average.value(state)), expected, rtol=1e-12)

    @jax.jit
    def plain(params, batches):
        average = ng.RunningAverage(1.0)
        update = lambda state, batch: (average.update(state, ng.kfac(model, SOFTMAX, params, batch)), None)
        start = average.init(jax.eval_shape(lambda: ng.kfac(model, SOFTMAX, params, batches[0])))
        return average.value(jax.lax.scan(update, start, batches)[0])

    whole = ng.kfac(model, SOFTMAX, params, x)
    burned_in = plain(params, jnp.stack(batches))
    np.testing.assert_allclose(A(burned_in), A(whole), rtol=1e-12)
    batched = ng.accumulate(lambda b: ng.kfac(model, SOFTMAX, params, b), [x[:4], x[4:]], progress=False)
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
    whole = ng.kfac(model, SQUARES, params, x).operator.blocks[0]
    with pytest.warns(UserWarning, match="6 inputs are more than `max_factor=4`: diagonal"):
        K = ng.kfac(model, SQUARES, params, x, blocks=ng.BlockRules(max_factor=4))
    np.testing.assert_allclose(K.operator.blocks[0].A[0, :, 0, 0], np.diagonal(whole.A[0, 0]), rtol=1e-12)
    np.testing.assert_allclose(K.operator.blocks[0].G, whole.G, rtol=1e-12)
    with pytest.warns(UserWarning, match="blocks of 3"):
        K = ng.kfac(model, SQUARES, params, x, blocks=ng.BlockRules(max_factor=4, oversized="blocked"))
    np.testing.assert_allclose(K.operator.blocks[0].A[0, 1], whole.A[0, 0, 3:, 3:], rtol=1e-12)


@pytest.mark.slow
def test_structures_can_be_chosen():
    model, params, x = mlp()
    exact = jax.jit(lambda p: ng.pullback(model, SOFTMAX, p, x).as_matrix())(params)
    structures = {"params[0]": "dense", "params[1]": "diagonal", "params[1]['w']": "kronecker"}
    K = ng.kfac(model, SOFTMAX, params, x, blocks=ng.BlockRules(structures=structures, strict=True))
    report = K.report()
    assert [report[f"params[{k}]['{n}']"].structure for k in range(3) for n in "wb"] == [
        "dense",
        "dense",
        "kronecker",
        "diagonal",
        "kronecker",
        "kronecker",
    ]
    corrected = ng.kfac(
        model, SOFTMAX, params, x, blocks=ng.BlockRules(structures={"params[2]": "eigenvalue-corrected"})
    )
    plain = ng.ekfac(model, SOFTMAX, params, x, blocks=ng.BlockRules(structures={"params[2]": "kronecker"}))
    rows = [{path: row.structure for path, row in metric.report().items()} for metric in (corrected, plain)]
    assert rows[0]["params[2]['w']"] == rows[1]["params[1]['w']"] == "eigenvalue-corrected"
    assert rows[0]["params[1]['w']"] == rows[1]["params[2]['w']"] == "kronecker"
    np.testing.assert_allclose(K.as_matrix()[:7, :7], exact[:7, :7], rtol=1e-10)
    np.testing.assert_allclose(np.diagonal(K.as_matrix())[42:48], np.diagonal(exact)[42:48], rtol=1e-10)


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
        K = ng.kfac(case.model, SQUARES, case.params, case.x)
    report = K.report()
    assert list(report) == [f"params['{name}']" for name in sorted(case.params)]
    assert report["params['unused']"].structure == "zero" and report["params['unused']"].reason
    covered = sum(np.prod(place.block) for place in K.operator.places)
    assert covered == K.in_size()
