"""Models that couple examples are refused, on concrete data and under `jit`; all others pass."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox.internal as eqxi
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from hypothesis import strategies as st
from jax import lax
from models import normal
from test_per_example_programs import NUM_ROWS, Writer, symbolic_jvp
from zoo import integers

import natgrad as ng

try:
    import diffrax
except ModuleNotFoundError:  # It is not in the environments of the oldest and the newest JAX.
    diffrax: Any = None
from natgrad._program.trace import trace_example

COUNT = 4
REFUSALS = (ValueError, RuntimeError)  # while it is traced, and while it runs


# Steps on a whole batch `h` of shape (N, D), of which each one is coupled.


def last_rows(h):
    return h.at[2:].add(h[:1])


def last_row(h):
    is_last = jnp.arange(len(h)) == len(h) - 1
    return jnp.where(is_last[:, None], jnp.sum(h, axis=0, keepdims=True), h) if len(h) > 1 else h


def numbered(h):
    return h * (1 + jnp.arange(len(h), dtype=h.dtype)[:, None])


def batch_norm(h):
    return (h - h.mean(axis=0, keepdims=True)) / jnp.sqrt(h.var(axis=0, keepdims=True) + 0.1)


def mask_for_the_batch(h):
    return jnp.where(jax.random.bernoulli(jax.random.key(3), 0.5, h.shape), h, 0.0)


def noise_for_the_batch(h):
    return h + jax.random.normal(jax.random.PRNGKey(3), h.shape, h.dtype)


def shuffled(h):
    return h[jax.random.permutation(jax.random.key(3), len(h))[::-1]]


def through_the_batch(h):
    """A recurrence from example to example."""
    return lax.scan(lambda c, row: (c + jnp.tanh(row), c * row), jnp.ones(h.shape[1:]), h)[1]


def by_associative_scan(h):
    return lax.associative_scan(jnp.maximum, h + jnp.arange(len(h), 0, -1, dtype=h.dtype)[:, None])


def until_all_are_small(h):
    return lax.while_loop(lambda h: jnp.any(jnp.abs(h) > 0.2), lambda h: h / 2, lax.stop_gradient(h)) * 9 + h


def if_one_is_positive(h):
    return lax.cond(jnp.any(h[-1:] * h[:1] < 0), lambda h: 2 * h, lambda h: h + 1, h) * (1 + (len(h) > 1))


def by_size(h):
    """The same equations, of which another result is used."""
    return (jnp.sin(h), jnp.cos(h))[len(h) > 1]


def by_size_inside(h):
    return jax.jit(lambda h: (jnp.sin(h), jnp.cos(h)))(h)[len(h) > 1]


def swapped_operands(h):
    a, b = jnp.sin(h), 2 * h
    return a - b if len(h) > 1 else b - a


def window_over_the_batch(h):
    return lax.reduce_window(h, -jnp.inf, lax.max, (2, 1), (1, 1), [(0, 1), (0, 0)])


def convolved_over_the_batch(h):
    kernel = jnp.ones((2, 1, 1))
    out = lax.conv_general_dilated(h.T[:, :, None], kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    return out[:, :, 0].T


def turned(h):
    """Entries of one example end up in another."""
    return h.T.reshape(h.shape) + h.reshape(-1)[::-1].reshape(h.shape)


def padded_and_cut(h):
    return jnp.pad(h, [(1, 0), (0, 0)])[:-1] + h


def mean_in_a_custom_rule(h):
    """The forward pass of a custom rule."""
    mean = jax.custom_jvp(lambda h: h - jnp.mean(h, axis=0, keepdims=True))
    mean.defjvp(lambda primals, tangents: (mean(*primals), tangents[0]))
    return mean(h)


def mean_in_a_scan(h):
    return lax.scan(lambda h, _: (jnp.tanh(h + jnp.mean(h, axis=0, keepdims=True)), None), h, None, length=2)[0]


def last_row_in_a_loop(h):
    """Only after a step has the carried value what couples."""
    step = lambda c, _: ((c[1], jnp.flip(c[1], 0)), None)
    return lax.scan(step, (h, h), None, length=2)[0][0] + h


def gathered_by_the_batch(h):
    return h[jnp.argmax(jnp.abs(h), axis=0)[:1].repeat(len(h))] + h


def map_with_a_neighbour(h):
    return lax.map(lambda rows: rows[0] * rows[1], (h, jnp.roll(h, 1, axis=0)))


def map_that_sees_all(h):
    return lax.map(lambda row: row + jnp.max(h, axis=0), h)


COUPLED: dict[str, Callable] = {
    step.__name__: step
    for step in (
        *(last_rows, last_row, numbered, batch_norm, mask_for_the_batch, noise_for_the_batch, shuffled),
        *(through_the_batch, by_associative_scan, until_all_are_small, if_one_is_positive, by_size, by_size_inside),
        *(swapped_operands, window_over_the_batch, convolved_over_the_batch, turned, padded_and_cut),
        *(mean_in_a_custom_rule, mean_in_a_scan, last_row_in_a_loop, gathered_by_the_batch, map_with_a_neighbour),
        map_that_sees_all,
    )
} | {
    "mean": lambda h: h - jnp.mean(h, axis=0, keepdims=True),
    "row_set": lambda h: h.at[0].set(h[-1]),
    "row_added_to": lambda h: h.at[jnp.zeros(len(h), int)].add(h),
    "first_row_updated": lambda h: lax.dynamic_update_slice(h, jnp.sin(h[-1:]), (0, 0)),
    "largest": lambda h: h + jnp.max(h, axis=0, keepdims=True),
    "softmax": lambda h: jax.nn.softmax(h, axis=0),
    "sorted": lambda h: jnp.sort(h, axis=0),
    "summed_up": lambda h: jnp.cumsum(h, axis=0),
    "rolled": lambda h: jnp.roll(h, 1, axis=0),
    "flipped": lambda h: jnp.flip(h, axis=0),
    "size": lambda h: h / h.shape[0],
    "attention": lambda h: jax.nn.softmax(h @ h.T, axis=-1) @ h,
    "fourier": lambda h: jnp.real(jnp.fft.fft(h, axis=0)),
    "largest_row": lambda h: h - lax.top_k(h.T, 1)[0].T,
}


# Steps that couple nothing, though some look as if they did.


def layer_norm(h):
    return (h - h.mean(axis=1, keepdims=True)) / jnp.sqrt(h.var(axis=1, keepdims=True) + 0.1)


def mask_for_all(h):
    """One mask that all examples share, whatever the size of the batch."""
    return h * jax.random.bernoulli(jax.random.key(3), 0.5, (1, h.shape[1])).astype(h.dtype)


def there_and_back(h):
    return jnp.flip(jnp.flip(jnp.tanh(h), axis=0), axis=0) + h.T.reshape(h.shape[::-1]).T


def over_features(h):
    return lax.scan(lambda c, column: (c + jnp.tanh(column), c * column), jnp.ones(len(h)), h.T)[1].T


def fixed_loop(h):
    return lax.fori_loop(0, 3, lambda k, h: jnp.tanh(h) + k.astype(h.dtype), h)


def own_loop(h):
    """Each example has a loop of its own length."""
    halved = lambda row: lax.while_loop(lambda row: jnp.any(jnp.abs(row) > 0.2), lambda row: row / 2, row)
    return jax.vmap(halved)(lax.stop_gradient(h)) + h


def own_branch(h):
    return jax.vmap(lambda r: lax.cond(jnp.sum(r) > 0, lambda r: 2 * r, lambda r: r - 1, r))(h)


def selected(h):
    first = jnp.argmax(h, axis=1)
    return h + jnp.take_along_axis(h, first[:, None], axis=1) + jnp.eye(h.shape[1])[first]


def of_pairs(h):
    return jnp.einsum("nd,ne->nde", h, jnp.sin(h)).reshape(len(h), -1)[:, : h.shape[1]]


def without_effect(h):
    return h + 0 * jnp.mean(h, axis=0, keepdims=True)


def mapped(h):
    return lax.map(lambda row: jnp.cumsum(jnp.sort(row)), h)


INDEPENDENT: dict[str, Callable] = {
    step.__name__: step
    for step in (
        *(layer_norm, mask_for_all, there_and_back, over_features, fixed_loop, own_loop, own_branch, selected),
        *(of_pairs, without_effect, mapped),
    )
} | {
    "softmax_of_features": lambda h: jax.nn.softmax(h, axis=-1),
    "column_set": lambda h: h * jnp.zeros_like(h).at[:, 1].set(2.0),
    "columns_added_to": lambda h: h.at[:, jnp.array([0, 2])].add(h[:, :2]),
    "own_entry_set": lambda h: jax.vmap(lambda row: row.at[jnp.argmax(row)].set(0.5))(h),
    "window_updated": lambda h: lax.dynamic_update_slice(h, jnp.sin(h[:, :2]), (0, 1)),
    "sorted_features": lambda h: jnp.sort(h, axis=1) + jnp.cumsum(h, axis=1) + jnp.roll(h, 1, axis=1),
    "top_feature": lambda h: h - lax.top_k(h, 1)[0],
    "transposed": lambda h: (jnp.arange(h.shape[1], dtype=h.dtype)[:, None] * h.T).T,
    "row_sums": lambda h: h * jnp.sum(h, axis=1, keepdims=True),
    "rematerialised": jax.checkpoint(lambda h: jnp.sin(h) * h),
    "fourier_of_features": lambda h: jnp.real(jnp.fft.fft(h, axis=1)),
    "taken": lambda h: h[jnp.arange(len(h))],
}


# Derivatives that couple examples, or depend on their number, behind outputs that do not.


def with_backward(backward: Callable) -> Callable:
    step = jax.custom_vjp(jnp.sin)
    step.defvjp(lambda h: (jnp.sin(h), h), lambda h, g: (backward(g * jnp.cos(h)),))
    return step


def with_tangent(tangent: Callable) -> Callable:
    step = jax.custom_jvp(jnp.sin)
    step.defjvp(lambda primals, tangents: (jnp.sin(*primals), tangent(jnp.cos(*primals) * tangents[0])))
    return step


COUPLED_DERIVATIVES = {
    "mean": with_backward(lambda g: g - jnp.mean(g, axis=0, keepdims=True)),
    "size": with_backward(lambda g: g / g.shape[0]),
    "clipped": with_backward(lambda g: g / (1 + jnp.linalg.norm(g))),
    "last_row": with_backward(lambda g: g.at[-1].multiply(2) if len(g) > 1 else g),
    "tangent_of_the_batch": with_tangent(lambda t: t + jnp.sum(t, axis=0, keepdims=True)),
    "in_a_scan": lambda h: lax.scan(lambda h, _: (COUPLED_DERIVATIVES["mean"](h), None), h, None, length=2)[0],
    "in_remat": jax.checkpoint(lambda h: COUPLED_DERIVATIVES["size"](h)),
}


class Coupling(NamedTuple):
    """A program of one example, a step on the whole batch, and another program."""

    before: Callable
    name: str
    step: Callable
    after: Callable
    params: dict[str, Any]
    x: tuple[Any, Any, Any]
    steps: tuple[str, ...]

    def model(self, params, x):
        mapped = lambda part, h: jax.vmap(part, in_axes=(None, 0, 0))(params, h, x[1:])
        h = mapped(self.before, x[0])
        h = self.step(h.reshape(len(h), -1))
        return mapped(self.after, h @ params["w"])

    def __repr__(self):
        return f"{self.name} in {' '.join(self.steps)}"


# What compiles soon, and loses nothing of what a step before it did.
AROUND = ("dense", "entrywise", "scalar", "residual", "layers", "remat", "jitted", "custom_rule", "dropout", "time")


def write(pick: Callable[[int], int], table: dict[str, Callable]) -> Coupling:
    name = list(table)[pick(len(table))]
    writer = Writer(pick, AROUND)
    shape = [(3,), (2, 3)][pick(2)]
    before, inner = writer.chain(shape, 1 + pick(2), 1)
    writer.steps.append(f"<{name}>")
    after, _ = writer.chain((3,), pick(2), 1)
    params = writer.params | {"w": normal(50, int(np.prod(inner)), 3)}
    keys = jax.random.split(jax.random.key(7), COUNT)
    x = (normal(1000, COUNT, *shape), integers(1001, 0, NUM_ROWS, COUNT, 3), keys)
    return Coupling(before, name, table[name], after, params, x, tuple(writer.steps))


@st.composite
def couplings(draw, table: dict[str, Callable]):
    return write(lambda n: draw(st.integers(0, n - 1)), table)


def gaps(model, params, x, u) -> tuple[float, float]:
    """How far outputs and gradients of the batch are from those of single examples, relative to their size."""
    alone = lambda params: jax.vmap(lambda x: model(params, jax.tree.map(lambda leaf: leaf[None], x))[0])(x)

    @jax.jit
    def compared(params):
        (a, pull), (b, pull_alone) = jax.vjp(lambda p: model(p, x), params), jax.vjp(alone, params)
        return a, b, jax.tree.leaves(pull(u)[0]), jax.tree.leaves(pull_alone(u)[0])

    a, b, *gradients = compared(params)
    flat, flat_alone = (np.concatenate([np.ravel(leaf) for leaf in leaves]) for leaves in gradients)
    far = lambda a, b: float(np.max(np.abs(a - b)) / np.max(np.abs(a)))
    return far(np.asarray(a), np.asarray(b)), far(flat, flat_alone)


def is_refused(call: Callable) -> bool:
    try:
        jax.block_until_ready(call())
    except REFUSALS as error:
        assert "couples examples" in str(error) or "do not add up" in str(error), error
        return True
    return False


class Verdict(NamedTuple):
    """Whether a model is said to couple nothing, and whether it is refused on concrete data and under `jit`."""

    is_safe: bool
    concrete: bool
    compiled: bool


def verdict(model, params, x, u) -> Verdict:
    norms = lambda params, x: ng.per_example(model, params, x, u).norms()
    trace = trace_example(model, params, x, 0)
    return Verdict(
        trace.coupling == "",
        is_refused(lambda: ng.per_example(model, params, x, u)),
        is_refused(lambda: jax.jit(norms)(params, x)),
    )


def check(program: Coupling) -> tuple[float, float]:
    """The laws: a claim that nothing is coupled is true, what is coupled is refused, and nothing else is."""
    u = normal(2000, *jax.eval_shape(program.model, program.params, program.x).shape)
    outputs, gradients = gaps(program.model, program.params, program.x, u)
    found = verdict(program.model, program.params, program.x, u)
    case = f"{found}, outputs off by {outputs:.1e}, gradients by {gradients:.1e}, for {program}"
    if found.is_safe:
        assert outputs < 1e-12, case
    if outputs > 1e-6:
        assert found.concrete and found.compiled, case
    if gradients > 1e-5:
        assert found.concrete, case
    if max(outputs, gradients) < 1e-10:
        assert not found.concrete and not found.compiled, case
    return outputs, gradients


ALL = {"coupled": COUPLED, "independent": INDEPENDENT, "derivative": COUPLED_DERIVATIVES}


def plain_params():
    return {"w": normal(1, 3, 3), "b": normal(2, 3, 3)}


def around(step: Callable) -> Callable:
    """A model with a parameter on both sides of a step."""
    return lambda p, x: step(x @ p["w"]) @ p["b"]


def refusals(model, params, x, message: str, *, under_jit: bool = True) -> None:
    """A model is refused on concrete data, and when a compiled program runs."""
    u = jnp.ones(jax.eval_shape(model, params, x).shape)
    with pytest.raises(ValueError, match=message):
        ng.per_example(model, params, x, u)
    if under_jit:
        with pytest.raises(REFUSALS, match=message):
            jax.block_until_ready(jax.jit(lambda p, x: ng.per_example(model, p, x, u).norms())(params, x))


@pytest.mark.parametrize("name", ["last_rows", "by_size", "swapped_operands", "mask_for_the_batch"])
def test_coupled_examples_are_refused(name):
    refusals(around(COUPLED[name]), plain_params(), normal(3, COUNT, 3), "couples examples")


@pytest.mark.sample(12)
@pytest.mark.compat
@pytest.mark.parametrize("name", COUPLED)
def test_coupling_is_seen_in_the_program(name):
    """A claim that nothing is coupled needs no run to be wrong."""
    assert trace_example(around(COUPLED[name]), plain_params(), normal(3, COUNT, 3), 0).coupling


# Which of the others can be told from the program; for the rest, a compiled program also runs the batch as it is.
SEEN = (
    *("layer_norm", "mask_for_all", "over_features", "fixed_loop", "of_pairs", "mapped", "softmax_of_features"),
    *("sorted_features", "transposed", "row_sums", "rematerialised", "column_set", "columns_added_to", "own_entry_set"),
    "window_updated",
)


@pytest.mark.compat
@pytest.mark.parametrize("name", SEEN)
def test_independence_is_seen_in_the_program(name):
    assert trace_example(around(INDEPENDENT[name]), plain_params(), normal(3, COUNT, 3), 0).coupling == ""


@pytest.mark.parametrize("name", ["there_and_back", "without_effect"])
def test_independent_examples_pass(name):
    u = jnp.ones((COUNT, 3))
    assert verdict(around(INDEPENDENT[name]), plain_params(), normal(3, COUNT, 3), u)[1:] == (False, False)


@pytest.mark.parametrize("name", ["mean", "size"])
def test_derivatives_that_couple_examples_are_refused(name):
    """Outputs say nothing of it, so a compiled program does not see it."""
    message = "do not add up to the gradient of its batch: for `.*` they are off by .*custom_vjp.*depends on the batch"
    refusals(around(COUPLED_DERIVATIVES[name]), plain_params(), normal(3, COUNT, 3), message, under_jit=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
@hypothesis.settings(max_examples=40, phases=[p for p in hypothesis.Phase if p is not hypothesis.Phase.shrink])
@hypothesis.given(data=st.data())
def test_random_couplings(kind, data):
    check(data.draw(couplings(ALL[kind])))


def write_stack(pick: Callable[[int], int]) -> tuple[Callable, tuple[str, ...]]:
    """A model of a few steps on a whole batch, few of which couple anything, and their names."""
    table = INDEPENDENT if pick(2) else INDEPENDENT | COUPLED
    names = tuple(list(table)[pick(len(table))] for _ in range(1 + pick(4)))

    def step(h):
        for name in names:
            h = jnp.tanh(table[name](h))
        return h

    return around(step), names


def check_claim(pick: Callable[[int], int]) -> tuple[str, float]:
    """What is said to couple nothing gives the outputs of examples one by one."""
    model, names = write_stack(pick)
    params, x = plain_params(), normal(3, COUNT, 3)
    coupling = trace_example(model, params, x, 0).coupling
    alone = lambda x: jax.vmap(lambda row: model(params, row[None])[0])(x)
    together, one_by_one = jax.jit(lambda x: (model(params, x), alone(x)))(x)
    gap = float(np.max(np.abs(together - one_by_one)))
    assert coupling or gap < 1e-12, (names, gap)
    return coupling, gap


@pytest.mark.slow
@hypothesis.settings(max_examples=100)
@hypothesis.given(data=st.data())
def test_claims_of_independence_are_true(data):
    check_claim(lambda n: data.draw(st.integers(0, n - 1)))


@pytest.mark.parametrize("size", ["reshape", "matrix"])
def test_hard_coded_batch_sizes_are_refused(size):
    steps = {"reshape": lambda h: h.reshape(COUNT, -1), "matrix": lambda h: jnp.eye(COUNT) @ h}
    refusals(
        around(steps[size]),
        plain_params(),
        normal(3, COUNT, 3),
        "fails on a batch of one example.*hard-coded batch size",
    )


@pytest.mark.float32
@pytest.mark.users_defaults
def test_coupling_in_a_small_output_next_to_a_large_one_is_refused():
    def model(w, x):
        hidden = x @ w
        return jnp.stack([1e3 * hidden[:, 0], hidden[:, 1] - 0.1 * jnp.mean(hidden[:, 1])], axis=1)

    with pytest.raises(ValueError, match="couples examples"):
        ng.per_example(model, normal(1, 3, 2), normal(2, 8, 3), jnp.ones((8, 2)))


@pytest.mark.users_defaults
def test_one_dropout_key_for_the_batch_is_refused():
    from flax import linen as nn

    drop = lambda h: nn.Dropout(0.5, deterministic=False).apply({}, h, rngs={"dropout": jax.random.key(1)})
    refusals(around(drop), plain_params(), normal(3, 8, 3), "couples examples.*one random mask for the whole batch")


@pytest.mark.users_defaults
def test_trained_batch_normalisation_is_refused():
    from flax import linen as nn

    layer = nn.BatchNorm(use_running_average=False)
    state = layer.init(jax.random.key(0), jnp.ones((COUNT, 3)))
    normalise = lambda h: layer.apply(state, h, mutable=["batch_stats"])[0]
    refusals(
        around(normalise), plain_params(), normal(3, COUNT, 3), "couples examples.*batch normalisation in training mode"
    )


# Rules that ask which of their inputs are perturbed.


def checkpointed_loop(w, x):
    step = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w))
    return eqxi.while_loop(lambda c: c[0] < 3, step, (0, x), max_steps=4, kind="checkpointed")[1]


def ordinary_equation(w, x):
    term = diffrax.ODETerm(lambda t, y, w: jnp.tanh(y @ w))
    solve = lambda y: diffrax.diffeqsolve(term, diffrax.Heun(), 0.0, 0.8, 0.4, y, w, max_steps=4).ys[0]
    return jax.vmap(solve)(x)


def symbolic_zeros(w, x):
    return symbolic_jvp()(jnp.sin(x), w)


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", [checkpointed_loop, ordinary_equation, symbolic_zeros])
def test_rules_see_parameters_as_perturbed(model):
    w, x, u = normal(1, 2, 2), normal(2, 8, 2), jnp.ones((8, 2))
    expected = jax.jit(jax.grad(lambda w: jnp.sum(model(w, x))))(w)
    assert np.linalg.norm(expected) > 0.1
    np.testing.assert_allclose(ng.per_example(model, w, x, u).gradient(), expected, rtol=1e-10)


@pytest.mark.slow
def test_no_rows_of_a_model_that_needs_some():
    """A slice without examples, of a model that does not run on none."""
    solver = optx.FixedPointIteration(1e-9, 1e-9)
    solve = lambda w, x: optx.fixed_point(lambda y, w: x + 0.1 * jnp.tanh(y @ w), solver, x, w, max_steps=20).value
    model = jax.vmap(solve, in_axes=(None, 0))
    per_example = ng.per_example(model, normal(1, 2, 2), normal(2, 1, 2), jnp.ones((1, 2)), check=False)
    assert per_example.rows(slice(1, None)).shape == (0, 2, 2)
