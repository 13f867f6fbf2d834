"""Statistics of the gradients of examples for programs nobody thought of, against the gradients themselves."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from models import normal
from zoo import along, integers

import natgrad as ng

NUM_ROWS = 5


class Program(NamedTuple):
    """A function of one example, made for a batch in one of three ways, and the names of what it is made of."""

    one: Callable  # one(params, h, i) -> h, for an activation and some indices
    params: dict[str, Any]
    x: tuple[Any, Any]
    batching: str
    budget: int
    steps: tuple[str, ...]

    def model(self, params, x):
        if self.batching == "vmap":
            return jax.vmap(self.one, in_axes=(None, 0, 0))(params, *x)
        if self.batching == "map":
            return lax.map(lambda row: self.one(params, *row), x)
        return jnp.stack([self.one(params, x[0][k], x[1][k]) for k in range(x[0].shape[0])])

    def __repr__(self):
        shapes = {name: leaf.shape for name, leaf in self.params.items()}
        return f"{' '.join(self.steps)} | {self.batching} of {self.x[0].shape}, budget {self.budget}, {shapes}"


class Writer:
    """Writes a program step by step. Choices are made by `pick(n)`, a number below `n`."""

    def __init__(self, pick: Callable[[int], int]):
        self.pick = pick
        self.params: dict[str, Any] = {}
        self.steps: list[str] = []

    def choose(self, options):
        return options[self.pick(len(options))]

    def new(self, *shape: int) -> str:
        name = f"p{len(self.params)}"
        self.params[name] = normal(len(self.params), *shape)
        return name

    def parameter(self, *shape: int) -> str:
        """A parameter of the given shape: a new one, or one that is in use already."""
        same = [name for name, leaf in self.params.items() if leaf.shape == shape]
        return self.choose(same) if same and self.pick(2) else self.new(*shape)

    def chain(self, shape, length: int, depth: int):
        parts = []
        for _ in range(length):
            part, shape = self.step(shape, depth)
            parts.append(part)

        def run(p, h, i):
            for part in parts:
                h = part(p, h, i)
            return h

        return run, shape

    def step(self, shape, depth: int):
        known = [kind for kind in STEPS if depth > 0 or kind not in NESTING]
        for _ in range(4):
            kind = self.choose(known)
            made = STEPS[kind](self, shape, depth)
            if made is not None:
                break
        else:
            kind, made = "tanh", (lambda p, h, i: jnp.tanh(h), shape)
        self.steps.append(kind)
        return made

    def keeping(self, shape):
        """A step that keeps the shape of the activation."""
        kind = self.choose(["square", "scale", "shift", "scalar"])
        self.steps.append("(" + kind)
        if kind == "square":
            w = self.parameter(shape[-1], shape[-1])
            return lambda p, h, i: jnp.tanh(h @ p[w])
        if kind == "scalar":
            s = self.parameter()
            return lambda p, h, i: h * p[s]
        b = self.parameter(shape[-1])
        if kind == "scale":
            return lambda p, h, i: h * along(p[b], h)
        return lambda p, h, i: h + along(p[b], h)


def narrow(h):
    """Keeps numbers small."""
    return h / h.shape[-1] ** 0.5


def dense(writer, shape, depth):
    width = 2 + writer.pick(3)
    w = writer.parameter(shape[-1], width)
    return lambda p, h, i: narrow(h @ p[w]), (*shape[:-1], width)


def left(writer, shape, depth):
    width = 2 + writer.pick(3)
    w = writer.parameter(width, shape[0])
    return lambda p, h, i: narrow(p[w] @ h), (width, *shape[1:])


def transposed(writer, shape, depth):
    fitting = [name for name, leaf in writer.params.items() if leaf.ndim == 2 and leaf.shape[1] == shape[-1]]
    if not fitting:
        return None
    w = writer.choose(fitting)
    return lambda p, h, i: narrow(h @ p[w].T), (*shape[:-1], writer.params[w].shape[0])


def grouped(writer, shape, depth):
    if shape[-1] % 2:
        return None
    inputs, outputs = shape[-1] // 2, 1 + writer.pick(3)
    w = writer.parameter(2, inputs, outputs)

    def run(p, h, i):
        h = h.reshape(*h.shape[:-1], 2, inputs)
        return jnp.einsum("...gd,gdo->...go", h, p[w]).reshape(*h.shape[:-2], -1)

    return run, (*shape[:-1], 2 * outputs)


def multilinear(writer, shape, depth):
    """Learned queries, and activations on both sides of a weight."""
    w, q = writer.parameter(shape[-1], shape[-1]), writer.parameter(2, shape[-1])

    def run(p, h, i):
        scores = jax.nn.softmax(narrow(jnp.atleast_2d(h) @ p[w]) @ (p[q] @ p[w]).T, axis=-1)
        return (scores @ p[q]).reshape(h.shape)

    return run, shape


def entrywise(writer, shape, depth):
    whole = writer.pick(2)
    kind = writer.pick(4)
    b = writer.parameter(*(shape if whole else shape[-1:]))

    def run(p, h, i):
        b_ = p[b] if whole else along(p[b], h)
        b_ = jnp.broadcast_to(b_, h.shape)
        if kind == 0:
            return h + b_
        if kind == 1:
            return h * b_ - b_
        if kind == 2:
            return b_ / (1.5 + h**2)
        return jnp.where(h > b_, h, b_ * h)

    return run, shape


def scalar(writer, shape, depth):
    s = writer.parameter()
    is_added = writer.pick(2)
    return lambda p, h, i: h + p[s] if is_added else jnp.sin(p[s] * h), shape


def reshape(writer, shape, depth):
    if len(shape) == 2:
        return lambda p, h, i: h.reshape(-1), (shape[0] * shape[1],)
    if shape[0] % 2 or shape[0] < 4:
        return None
    return lambda p, h, i: h.reshape(2, -1), (2, shape[0] // 2)


def transpose(writer, shape, depth):
    return (lambda p, h, i: h.T, shape[::-1]) if len(shape) == 2 else None


def cut_and_join(writer, shape, depth):
    k = 1 + writer.pick(shape[-1])
    return lambda p, h, i: jnp.concatenate([jnp.sin(h[..., :k]), h], axis=-1)[..., -5:], (
        *shape[:-1],
        min(5, shape[-1] + k),
    )


def fused(writer, shape, depth):
    width = 1 + writer.pick(3)
    w = writer.parameter(shape[-1], 2 * width)
    twice = writer.pick(2)

    def run(p, h, i):
        gate, value = jnp.split(p[w], 2, axis=1)
        y = jax.nn.sigmoid(h @ gate) * (h @ value)
        return y + jnp.cos(h) @ gate if twice else y

    return run, (*shape[:-1], width)


def overlapping(writer, shape, depth):
    """Slices of a parameter that have some of their entries in common."""
    w = writer.parameter(shape[-1] + 1, shape[-1])
    return lambda p, h, i: jnp.tanh(h @ p[w][1:]) @ p[w][:-1], shape


def cast(writer, shape, depth):
    w = writer.parameter(shape[-1], shape[-1])
    return lambda p, h, i: narrow(h @ p[w].astype(jnp.float32).astype(h.dtype)), shape


def computed(writer, shape, depth):
    """Weights that are computed from parameters."""
    w, v = writer.parameter(shape[-1], shape[-1]), writer.parameter(shape[-1], shape[-1])
    s, kind = writer.parameter(), writer.pick(5)

    def weight(p):
        if kind == 0:
            return p[w] @ p[v]
        if kind == 1:
            return p[s] * p[w]
        if kind == 2:
            return p[w] - p[v].T / 2
        if kind == 3:
            return jnp.concatenate([p[w][:1], p[v][1:]]) * 0.7
        return jnp.tril(p[w]) + p[s] * jnp.eye(p[w].shape[0])

    return lambda p, h, i: narrow(h @ weight(p)), shape


def lookup(writer, shape, depth):
    table = writer.parameter(NUM_ROWS, shape[-1])
    kind = writer.pick(4)

    def run(p, h, i):
        if kind == 0:
            return h + along(jnp.sum(p[table][i], axis=0), h)
        if kind == 1:
            return h * along(jnp.take(p[table], i[0] - 2, axis=0, mode="clip"), h)
        if kind == 2:
            return h + jnp.sum(along(p[table].at[i + 1].get(mode="fill", fill_value=0).T @ jnp.ones(3), h), axis=0)
        return h + along(lax.dynamic_index_in_dim(p[table], i[1], keepdims=False), h)

    if kind == 2 and len(shape) == 2:
        return None
    return run, shape


def head(writer, shape, depth):
    """The table that rows are looked up in, as a weight."""
    table = writer.parameter(NUM_ROWS, shape[-1])
    return lambda p, h, i: jax.nn.softmax(h @ p[table].T, axis=-1) @ p[table] + along(p[table][i[0]], h), shape


def layers(writer, shape, depth):
    """Stacked parameters, in a loop of one of several kinds."""
    length, width = 2 + writer.pick(2), shape[-1]
    w, b = writer.parameter(length, width, width), writer.parameter(length, width)
    kind, shared = writer.pick(5), writer.parameter(width, width)
    also, reverse = writer.pick(2), bool(writer.pick(2))

    def layer(p, h, w_, b_):
        return jnp.tanh(narrow(h @ w_) + along(b_, h)) @ p[shared] if kind else narrow(h @ w_) * along(b_, h)

    def run(p, h, i):
        if kind in (0, 1):
            h = lax.scan(lambda h, own: (layer(p, h, *own), None), h, (p[w], p[b]), reverse=reverse)[0]
        elif kind == 2:
            step = jax.checkpoint(lambda h, own: (layer(p, h, *own), None))
            h = lax.scan(step, h, (p[w], p[b]), reverse=reverse)[0]
        elif kind == 3:
            h = lax.fori_loop(0, length, lambda k, h: layer(p, h, p[w][k], p[b][k]), h)
        else:
            body = lambda k, state: (0.9 * state[0], layer(p, state[1], state[0] @ p[w][k], p[b][k]))
            h = lax.fori_loop(0, length, body, (p[shared], h))[1]
        return h + narrow(h @ p[w][0]) if also else h

    return run, shape


def time(writer, shape, depth):
    """A recurrence along the first axis."""
    if len(shape) < 2:
        return None
    width, kind = shape[-1], writer.pick(3)
    a, b, start = writer.parameter(width, width), writer.parameter(width, width), writer.parameter(width)

    def run(p, h, i):
        def cell(c, row):
            c = jnp.tanh(narrow(c @ p[a]) + narrow(row @ p[b]))
            return c, c * p[start]

        step = jax.checkpoint(cell) if kind == 2 else cell
        last, all_ = lax.scan(step, p[start] if kind else jnp.zeros_like(p[start]), h)
        return jnp.concatenate([all_, last[None]]) if kind == 1 else all_

    return run, ((shape[0] + 1, width) if kind == 1 else shape)


def nested_loops(writer, shape, depth):
    width = shape[-1]
    w, b = writer.parameter(2, width, width), writer.parameter(3, width)
    kind = writer.pick(3)

    def run(p, h, i):
        def outer(h, w_):
            if kind == 0:
                inner = lambda k, h: jnp.tanh(narrow(h @ w_) + along(p[b][k], h))
                return lax.fori_loop(0, 3, inner, h), None
            if kind == 1:
                inner = lambda h, b_: (jnp.tanh(narrow(h @ w_)) * along(b_, h), h[..., 0])
                h, seen = lax.scan(inner, h, p[b])
                return h + jnp.sum(seen), None
            inner = lambda k, state: (0.9 * state[0], jnp.tanh(narrow(state[1] @ state[0])) * along(p[b][k], h))
            return lax.fori_loop(0, 3, inner, (w_, h))[1], None

        return lax.scan(outer, h, p[w])[0]

    return run, shape


def convolution(writer, shape, depth):
    """Along the first axis."""
    if len(shape) < 2:
        return None
    width = 1 + writer.pick(3)
    kernel = writer.parameter(2, shape[-1], width)
    dimensions = ("NWC", "WIO", "NWC")
    return (
        lambda p, h, i: lax.conv_general_dilated(h[None], p[kernel], (1,), "SAME", dimension_numbers=dimensions)[0],
        (shape[0], width),
    )


def remat(writer, shape, depth):
    part, shape = writer.chain(shape, 1 + writer.pick(2), depth - 1)
    return lambda p, h, i: jax.checkpoint(part)(p, h, i), shape


def jitted(writer, shape, depth):
    part, new = writer.chain(shape, 1 + writer.pick(2), depth - 1)
    part = jax.jit(part)
    if new == shape and writer.pick(2):
        return lambda p, h, i: part(p, jnp.cos(part(p, h, i)), i), shape
    return lambda p, h, i: part(p, h, i), new


def cond(writer, shape, depth):
    """A branch chosen by the data, by an index, or by a parameter."""
    first, second, kind = writer.keeping(shape), writer.keeping(shape), writer.pick(4)
    t = writer.parameter()

    def run(p, h, i):
        if kind == 3:
            return lax.switch(i[0] % 3, [lambda h: first(p, h, i), lambda h: h, lambda h: second(p, h, i)], h)
        chosen = [jnp.sum(h) > 0, i[0] > 2, p[t] > 0][kind]
        return lax.cond(chosen, lambda h: first(p, h, i), lambda h: second(p, h, i) + p[t], h)

    return run, shape


def residual(writer, shape, depth):
    part = writer.keeping(shape)
    return lambda p, h, i: h + part(p, jnp.cos(h), i), shape


def activation(writer, shape, depth):
    return (lambda p, h, i: jnp.tanh(h), shape) if writer.pick(2) else (lambda p, h, i: jax.nn.relu(h + 0.3), shape)


NESTING = {"remat": remat, "jitted": jitted}
STEPS = {
    step.__name__: step
    for step in (
        *(dense, left, transposed, grouped, multilinear, entrywise, scalar, reshape, transpose, cut_and_join),
        *(fused, overlapping, cast, computed, lookup, head, layers, time, nested_loops, convolution),
        *(cond, residual, activation),
    )
} | NESTING


def write(pick: Callable[[int], int]) -> Program:
    writer = Writer(pick)
    shape = [(3,), (4,), (2, 3), (3, 4)][pick(4)]
    count = [1, 3, 5][pick(3)]
    length, batching = 1 + pick(5), ["vmap", "loop", "map"][pick(3)]
    one, _ = writer.chain(shape, length, 2)
    if not writer.params:
        one = compose(one, writer.keeping(shape))
    budget = [2**26, 64, 700][pick(3)]
    x = (normal(1000, count, *shape), integers(1001, 0, NUM_ROWS, count, 3))
    return Program(one, writer.params, x, batching, budget, tuple(writer.steps))


def compose(last, first):
    return lambda p, h, i: last(p, first(p, h, i), i)


@st.composite
def programs(draw):
    return write(lambda n: draw(st.integers(0, n - 1)))


def brute(model, params, x, cotangents):
    """The gradients of examples one by one: `(C, N, ...)` for cotangents `(C, N, ...)`."""

    def one(x, u):
        _, pull = jax.vjp(lambda p: model(p, jax.tree.map(lambda leaf: leaf[None], x)), params)
        return jax.vmap(lambda u: pull(jax.tree.map(lambda leaf: leaf[None], u))[0], out_axes=0)(u)

    return jax.vmap(one, in_axes=(0, 1), out_axes=1)(x, cotangents)


def statistics(per_example, v, weights):
    return {
        "gradient": per_example.gradient(),
        "squared_sum": per_example.squared_sum(),
        "fourth": per_example.power_sum(4),
        "norms": per_example.norms(),
        "gram": per_example.gram(),
        "rows": per_example.rows(),
        "some_rows": per_example.rows(slice(1, None, 2)),
        "matvec": per_example.matvec(v),
        "rmatvec": per_example.rmatvec(weights),
    }


def expected_statistics(rows, v, weights):
    """The same from the gradients themselves, with `lead` axes in front: `(N,)`, or `(C, N)`."""
    lead = np.ndim(weights)
    axes = tuple(range(lead))
    rows = jax.tree.map(np.asarray, rows)
    stack = lambda tree: np.concatenate([leaf.reshape(*leaf.shape[:lead], -1) for leaf in jax.tree.leaves(tree)], -1)
    flat = stack(rows)
    return {
        "gradient": jax.tree.map(lambda leaf: leaf.sum(axes), rows),
        "squared_sum": jax.tree.map(lambda leaf: (leaf**2).sum(axes), rows),
        "fourth": jax.tree.map(lambda leaf: (leaf**4).sum(axes), rows),
        "norms": np.linalg.norm(flat, axis=-1),
        "gram": np.tensordot(flat, flat, (-1, -1)),
        "rows": rows,
        "some_rows": jax.tree.map(lambda leaf: leaf[(slice(None),) * (lead - 1) + (slice(1, None, 2),)], rows),
        "matvec": flat @ np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(v)]),
        "rmatvec": jax.tree.map(lambda leaf: np.tensordot(np.asarray(weights), leaf, lead), rows),
    }


def differences(actual, expected, tolerance: float) -> dict[str, float]:
    """Where trees differ by more than the tolerance, relative to the largest entry of all leaves of a statistic."""
    found = {}
    for name in expected:
        leaves = jax.tree_util.tree_leaves_with_path(expected[name])
        largest = max(np.max(np.abs(leaf), initial=0.0) for _, leaf in leaves)
        for (path, b), a in zip(leaves, jax.tree.leaves(actual[name]), strict=True):
            assert np.shape(a) == np.shape(b), (name, path, np.shape(a), np.shape(b))
            error = np.max(np.abs(np.asarray(a) - b), initial=0.0)
            if not error <= tolerance * largest:
                found[name + jax.tree_util.keystr(path)] = float(error / largest) if largest else float(error)
    return found


def compare(model, params, x, budget: int = 2**26, tolerance: float = 1e-10, stacks=(False, True)) -> dict:
    """Every statistic against the gradients themselves, for one cotangent an example and for two. Gives what differs."""
    z = jax.eval_shape(model, params, x)
    u = jax.tree.map(lambda leaf: normal(2000, 2, *leaf.shape), z)
    v = jax.tree.map(lambda leaf: normal(2001, *leaf.shape), params)
    count = jax.tree.leaves(z)[0].shape[0]
    weights = {True: normal(2002, 2, count), False: normal(2003, count)}
    cotangents = {True: u, False: jax.tree.map(lambda leaf: leaf[0], u)}

    @jax.jit
    def all_statistics(params, x):
        made = {s: ng.per_example(model, params, x, cotangents[s], check=False, budget=budget) for s in stacks}
        return {s: statistics(made[s], v, weights[s]) for s in stacks}

    rows = jax.jit(functools.partial(brute, model))(params, x, u)
    actual = all_statistics(params, x)
    found = {}
    for s in stacks:
        own = rows if s else jax.tree.map(lambda leaf: leaf[0], rows)
        wrong = differences(actual[s], expected_statistics(own, v, weights[s]), tolerance)
        found |= {f"{'stacked ' if s else ''}{name}": error for name, error in wrong.items()}
    return found


def agree(program: Program) -> None:
    # A gradient with respect to a parameter that was cast is rounded for every example, or not at all.
    tolerance = 3e-6 if "cast" in program.steps else 1e-10
    wrong = compare(program.model, program.params, program.x, program.budget, tolerance)
    assert not wrong, f"{wrong} for {program}"
