"""Statistics of the gradients of examples for programs nobody thought of, against the gradients themselves."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import equinox.internal as eqxi
import hypothesis
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
import pytest
from hypothesis import strategies as st
from jax import lax
from models import normal
from zoo import along, integers

import natgrad as ng

try:
    import diffrax
except ModuleNotFoundError:  # It is not in the environments of the oldest and the newest JAX.
    diffrax: Any = None

NUM_ROWS = 5


class Program(NamedTuple):
    """A function of one example, made for a batch in one of three ways, and the names of what it is made of."""

    one: Callable  # one(params, h, i) -> h, for an activation and a pair of indices and a key
    params: dict[str, Any]
    x: tuple[Any, Any, Any]
    batching: str
    budget: int
    steps: tuple[str, ...]
    has_aux: bool = False

    def outputs(self, params, x):
        if self.batching == "vmap":
            return jax.vmap(self.one, in_axes=(None, 0, 0))(params, x[0], x[1:])
        if self.batching == "map":
            return lax.map(lambda row: self.one(params, row[0], row[1:]), x)
        return jnp.stack([self.one(params, x[0][k], (x[1][k], x[2][k])) for k in range(x[0].shape[0])])

    def model(self, params, x):
        """What else it returns may depend on the whole batch."""
        z = self.outputs(params, x)
        return (z, {"mean": jnp.mean(z), "shape": x[0].shape}) if self.has_aux else z

    def __repr__(self):
        shapes = {name: leaf.shape for name, leaf in self.params.items()}
        aux = ", with aux" if self.has_aux else ""
        return f"{' '.join(self.steps)} | {self.batching} of {self.x[0].shape}, budget {self.budget}, {shapes}{aux}"


class Writer:
    """Writes a program step by step. Choices are made by `pick(n)`, a number below `n`."""

    def __init__(self, pick: Callable[[int], int], kinds: Sequence[str]):
        self.pick = pick
        self.kinds = kinds
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
        is_slow = not COMPILING_SLOWLY.isdisjoint(self.steps)
        known = [kind for kind in self.kinds if depth > 0 or kind not in NESTING]
        known = [kind for kind in known if not is_slow or kind not in COMPILING_SLOWLY] or ["activation"]
        for _ in range(4):
            kind = self.choose(known)
            made = STEPS[kind](self, shape, depth)
            if made is not None:
                break
        else:
            kind, made = "tanh", (lambda p, h, i: jnp.tanh(h), shape)
        self.steps.append(kind)
        part, shape = made
        return (part if kind in NESTING or kind in DRAWING else lambda p, h, i: part(p, h, i[0])), shape

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
    s, kind = writer.parameter(), writer.pick(7)

    def weight(p):
        if kind == 0:
            return p[w] @ p[v]
        if kind == 1:
            return p[s] * p[w]
        if kind == 2:
            return p[w] - p[v].T / 2
        if kind == 3:
            return jnp.concatenate([p[w][:1], p[v][1:]]) * 0.7
        if kind == 4:
            return jnp.concatenate([p[w][:1], p[v][1:]])
        if kind == 5:
            return jnp.pad(p[w][1:], [(0, 1), (0, 0)])
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


def masked(writer, shape, depth):
    """Entries that an example leaves out, by its indices or by its data."""
    kind, b = writer.pick(3), writer.parameter(shape[-1])

    def run(p, h, i):
        if kind == 0:
            return jnp.where(along(jnp.arange(h.shape[-1]) < i[0], h), h, 1.0)
        if kind == 1:
            return jax.nn.softmax(jnp.where(h > 0, h + along(p[b], h), -1e9), axis=-1)
        return jnp.where(h > 0.2, h, lax.stop_gradient(h) * along(p[b], h))

    return run, shape


def dropout(writer, shape, depth):
    """Random numbers of the example's own key."""
    kind, s = writer.pick(3), writer.parameter(shape[-1])

    def run(p, h, i):
        first, second = jax.random.split(jax.random.fold_in(i[1], 3) if kind else i[1])
        if kind == 2:
            return h + along(p[s], h) * jax.random.normal(second, h.shape, h.dtype)
        return jnp.where(jax.random.bernoulli(first, 0.6, h.shape), h / 0.6, along(p[s], h))

    return run, shape


def equinox_loop(writer, shape, depth):
    """Loops whose derivative depends on what is perturbed."""
    width = shape[-1]
    w, b = writer.parameter(width, width), writer.parameter(3, width)
    kind, loop = (
        writer.choose([("while", "checkpointed"), ("while", "bounded"), ("scan", "checkpointed")]),
        writer.pick(3),
    )

    def run(p, h, i):
        layer = lambda h, w_, b_: jnp.tanh(narrow(h @ w_) + along(b_, h))
        if kind[0] == "scan":
            step = lambda h, b_: (layer(h, p[w], b_), h.sum() if loop else None)
            h, seen = eqxi.scan(
                step, h, p[b], kind=["lax", "checkpointed", "bounded"][loop], checkpoints=2 if loop == 1 else None
            )
            return h if seen is None else h * jnp.sum(seen)
        if loop == 0:
            step = lambda c: (c[0] + 1, layer(c[1], p[w], p[b][0]))
            return eqxi.while_loop(lambda c: c[0] < 3, step, (0, h), max_steps=4, kind=kind[1])[1]
        # A loop that ends with the data, and carries a parameter along.
        step = lambda c: (c[0] + 1, layer(c[1], c[2], p[b][0]), c[2] * 0.9 if loop == 2 else c[2])
        until = lambda c: (c[0] < 4) & (jnp.sum(c[1] ** 2) > 0.3)
        return eqxi.while_loop(until, step, (0, h, p[w]), max_steps=4, kind=kind[1])[1]

    return run, shape


def lax_loop(writer, shape, depth):
    """A loop that cannot be differentiated in reverse mode, of numbers that have no derivative."""
    s = writer.parameter()

    def run(p, h, i):
        start = (0, lax.stop_gradient(h * p[s]))
        count, gate = eqxi.while_loop(
            lambda c: (c[0] < 5) & (jnp.max(jnp.abs(c[1])) > 0.4), lambda c: (c[0] + 1, 0.6 * c[1]), start, kind="lax"
        )
        return h * (1 + p[s]) + gate * count

    return run, shape


def differential_equation(writer, shape, depth):
    w, b = writer.parameter(shape[-1], shape[-1]), writer.parameter(shape[-1])
    solver = writer.choose([diffrax.Euler(), diffrax.Heun()])
    adjoint = writer.choose(
        [
            diffrax.RecursiveCheckpointAdjoint(),
            diffrax.DirectAdjoint(),
            diffrax.RecursiveCheckpointAdjoint(checkpoints=2),
        ]
    )
    closes_over, saves_all = writer.pick(2), writer.pick(2)

    def run(p, h, i):
        field = lambda t, y, args: jnp.tanh(y @ (p[w] if closes_over else args[0])) * along(args[1], y)
        at = diffrax.SaveAt(ts=jnp.array([0.4, 0.8])) if saves_all else diffrax.SaveAt(t1=True)
        args = None if closes_over else p[w], p[b]
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(field), solver, 0.0, 0.8, 0.4, h, args, saveat=at, adjoint=adjoint, max_steps=4
        )
        return jnp.sum(solution.ys, axis=0)

    return run, shape


def solved(product, v):
    """The solution of a linear system that is known by its products."""
    matrix = jax.jacobian(product)(v).reshape(v.size, v.size)
    return jnp.linalg.solve(matrix, v.reshape(-1)).reshape(v.shape)


def implicit(writer, shape, depth):
    """The solution of an equation, with the derivative of the implicit function theorem."""
    w, b, kind = writer.parameter(shape[-1], shape[-1]), writer.parameter(shape[-1]), writer.pick(4)
    is_passed = writer.pick(2)

    def run(p, h, i):
        contraction = lambda y, args: h + 0.1 * jnp.tanh(y @ (args[0] if is_passed else p[w]) + along(args[1], y))
        difference = lambda y, args: y - contraction(y, args)
        args = p[w] if is_passed else None, p[b]
        if kind == 0:
            return optx.fixed_point(contraction, optx.FixedPointIteration(1e-9, 1e-9), h, args, max_steps=20).value
        if kind == 1:
            return optx.root_find(difference, optx.Newton(1e-9, 1e-9), h, args, max_steps=10).value
        if kind == 2:
            direct = optx.RecursiveCheckpointAdjoint()
            solver = optx.FixedPointIteration(1e-4, 1e-4)
            return optx.fixed_point(contraction, solver, h, args, adjoint=direct, max_steps=10).value
        solve = lambda f, start: lax.fori_loop(0, 12, lambda _, y: y - f(y), start)
        return lax.custom_root(lambda y: difference(y, args), h, solve, solved)

    return run, shape


def linear_solve(writer, shape, depth):
    """A system whose matrix is a parameter, or computed from parameter and data."""
    width, kind = shape[-1], writer.pick(4)
    w, s = writer.parameter(width, width), writer.parameter()

    def run(p, h, i):
        rows = jnp.atleast_2d(h)
        matrix = 3 * jnp.eye(width) + p[w] @ p[w].T / width + (kind % 2) * jnp.sum(h) ** 2 * jnp.eye(width)
        if kind < 2:
            product = lambda v: v @ matrix + 0.1 * p[s] ** 2 * v
            return lax.custom_linear_solve(product, rows, solved, transpose_solve=solved).reshape(h.shape)
        operator = lx.MatrixLinearOperator(matrix)
        solve = lambda row: lx.linear_solve(operator, row, lx.AutoLinearSolver(well_posed=True)).value
        return jax.vmap(solve)(rows).reshape(h.shape)

    return run, shape


def outer(h, g):
    """The gradient of a weight, for inputs and cotangents that may have an axis of positions."""
    return jnp.tensordot(h, g, [list(range(g.ndim - 1))] * 2)


def plain_jvp():
    @jax.custom_jvp
    def product(h, w):
        return jnp.tanh(h @ w)

    @product.defjvp
    def rule(primals, tangents):
        (h, w), (dh, dw) = primals, tangents
        return product(h, w), dh @ w / 2 + jnp.cos(h) @ dw

    return product


def symbolic_jvp():
    """The derivative with respect to one argument depends on whether the other is perturbed."""

    def rule(primals, tangents):
        (h, w), (dh, dw) = primals, tangents
        zero = [isinstance(tangent, jax.custom_derivatives.SymbolicZero) for tangent in tangents]
        tangent = jnp.zeros_like(h @ w)
        if not zero[0]:
            tangent = tangent + dh @ w / (1 if zero[1] else 2)
        if not zero[1]:
            tangent = tangent + jnp.cos(h) @ dw * (3 if zero[0] else 1)
        return jnp.tanh(h @ w), tangent

    product = jax.custom_jvp(lambda h, w: jnp.tanh(h @ w))
    product.defjvp(rule, symbolic_zeros=True)
    return product


def plain_vjp():
    product = jax.custom_vjp(lambda h, w: jnp.tanh(h @ w))
    product.defvjp(
        lambda h, w: (jnp.tanh(h @ w), (h, w)),
        lambda kept, g: (g @ kept[1].T / 2, outer(jnp.cos(kept[0]), g)),
    )
    return product


def symbolic_vjp():
    """The cotangent of one argument depends on whether the other is perturbed."""

    def forward(h, w):
        is_alone = not (h.perturbed and w.perturbed)
        return jnp.tanh(h.value @ w.value), (h.value, w.value, is_alone)

    def backward(kept, g):
        h, w, is_alone = kept
        return g @ w.T / (1 + is_alone), outer(jnp.cos(h), g) * (1 + 2 * is_alone)

    product = jax.custom_vjp(lambda h, w: jnp.tanh(h @ w))
    product.defvjp(forward, backward, symbolic_zeros=True)
    return product


def nondifferentiated_vjp():
    product = jax.custom_vjp(lambda power, h, w: jnp.tanh(h @ w) ** power, nondiff_argnums=(0,))
    product.defvjp(
        lambda power, h, w: (jnp.tanh(h @ w) ** power, (h, w)),
        lambda power, kept, g: (g @ kept[1].T / power, power * outer(kept[0], g)),
    )
    return lambda h, w: product(2, h, w)


def filtered_jvp():
    @eqx.filter_custom_jvp
    def product(h, w):
        return jnp.tanh(h @ w)

    @product.def_jvp
    def rule(primals, tangents):
        (h, w), (dh, dw) = primals, tangents
        tangent = jnp.zeros_like(h @ w)
        if dh is not None:
            tangent = tangent + dh @ w / 2
        if dw is not None:
            tangent = tangent + jnp.cos(h) @ dw
        return jnp.tanh(h @ w), tangent

    return product


def filtered_vjp():
    @eqx.filter_custom_vjp
    def product(pair):
        return jnp.tanh(pair[0] @ pair[1])

    @product.def_fwd
    def forward(perturbed, pair):
        return jnp.tanh(pair[0] @ pair[1]), perturbed

    @product.def_bwd
    def backward(perturbed, g, was_perturbed, pair):
        (h, w), scale = pair, 1 + 2 * (not all(perturbed))
        by_h = g @ w.T / 2 if perturbed[0] else None
        return by_h, scale * outer(jnp.cos(h), g) if perturbed[1] else None

    return lambda h, w: product((h, w))


def converted():
    """A function whose captured arrays are found by tracing it."""

    def product(h, w):
        function = eqx.filter_closure_convert(lambda h: jnp.tanh(h @ w), h)
        return function(h)

    return product


RULES = (
    *(plain_jvp, symbolic_jvp, plain_vjp, symbolic_vjp),
    *(nondifferentiated_vjp, filtered_jvp, filtered_vjp, converted),
)


def custom_rule(writer, shape, depth):
    """A derivative that is not that of the function, by every way to say so, alone or inside something."""
    rule, kind = writer.choose(RULES), writer.pick(5)
    writer.steps.append("(" + rule.__name__)
    product = rule()
    w, stack = writer.parameter(shape[-1], shape[-1]), writer.parameter(2, shape[-1], shape[-1])

    def run(p, h, i):
        if kind == 1:
            return lax.scan(lambda h, w_: (product(h, w_), None), h, p[stack])[0]
        if kind == 2:
            return jax.checkpoint(product)(h, p[w])
        if kind == 3:
            return jax.jit(product)(h, p[w])
        if kind == 4:
            return lax.scan(lambda h, _: (product(h, p[w]), None), h, None, length=2)[0]
        return product(h, p[w])

    return run, shape


NESTING = {"remat": remat, "jitted": jitted}
DRAWING = {"dropout": dropout}
# One of these is enough for a program.
COMPILING_SLOWLY = {"equinox_loop", "differential_equation", "implicit", "linear_solve"}
SOLVERS = {
    step.__name__: step
    for step in (equinox_loop, lax_loop, differential_equation, implicit, linear_solve, custom_rule, masked)
} | DRAWING
STEPS = (
    {
        step.__name__: step
        for step in (
            *(dense, left, transposed, grouped, multilinear, entrywise, scalar, reshape, transpose, cut_and_join),
            *(fused, overlapping, cast, computed, lookup, head, layers, time, nested_loops, convolution),
            *(cond, residual, activation),
        )
    }
    | NESTING
    | SOLVERS
)


def write(pick: Callable[[int], int], steps: Sequence[str] = tuple(STEPS)) -> Program:
    """A program of some kinds of steps."""
    writer = Writer(pick, steps)
    shape = [(3,), (4,), (2, 3), (3, 4)][pick(4)]
    count = [1, 3, 5][pick(3)]
    length, batching = 1 + pick(5), ["vmap", "loop", "map"][pick(3)]
    one, _ = writer.chain(shape, length, 2)
    if not writer.params:
        one = compose(one, writer.keeping(shape))
    budget = [2**26, 64, 700][pick(3)]
    x = (normal(1000, count, *shape), integers(1001, 0, NUM_ROWS, count, 3), jax.random.split(jax.random.key(7), count))
    return Program(one, writer.params, x, batching, budget, tuple(writer.steps), has_aux=not pick(4))


def compose(last, first):
    return lambda p, h, i: last(p, first(p, h, i), i)


@st.composite
def programs(draw, steps: Sequence[str] = tuple(STEPS)):
    return write(lambda n: draw(st.integers(0, n - 1)), steps)


def brute(model, params, x, cotangents):
    """The gradients of examples one by one: `(C, N, ...)` for cotangents `(C, N, ...)`."""

    def one(x, u):
        _, pull = jax.vjp(lambda p: model(p, jax.tree.map(lambda leaf: leaf[None], x)), params)
        return jax.vmap(lambda u: pull(jax.tree.map(lambda leaf: leaf[None], u))[0], out_axes=0)(u)

    return jax.vmap(one, in_axes=(0, 1), out_axes=1)(x, cotangents)


STATISTICS = {
    "gradient": lambda per_example, v, weights: per_example.gradient(),
    "squared_sum": lambda per_example, v, weights: per_example.squared_sum(),
    "fourth": lambda per_example, v, weights: per_example.power_sum(4),
    "norms": lambda per_example, v, weights: per_example.norms(),
    "gram": lambda per_example, v, weights: per_example.gram(),
    "rows": lambda per_example, v, weights: per_example.rows(),
    "some_rows": lambda per_example, v, weights: per_example.rows(slice(1, None, 2)),
    "matvec": lambda per_example, v, weights: per_example.matvec(v),
    "rmatvec": lambda per_example, v, weights: per_example.rmatvec(weights),
}
# The others take the same two ways, by rows and by transposition.
FEW = ("gradient", "norms")


def statistics(per_example, v, weights, names: Sequence[str] = tuple(STATISTICS)):
    return {name: STATISTICS[name](per_example, v, weights) for name in names}


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
    for name in actual:
        leaves = jax.tree_util.tree_leaves_with_path(expected[name])
        largest = max(np.max(np.abs(leaf), initial=0.0) for _, leaf in leaves)
        for (path, b), a in zip(leaves, jax.tree.leaves(actual[name]), strict=True):
            assert np.shape(a) == np.shape(b), (name, path, np.shape(a), np.shape(b))
            error = np.max(np.abs(np.asarray(a) - b), initial=0.0)
            if not error <= tolerance * largest:
                found[name + jax.tree_util.keystr(path)] = float(error / largest) if largest else float(error)
    return found


def compare(
    model,
    params,
    x,
    budget: int = 2**26,
    tolerance: float = 1e-10,
    stacks=(False, True),
    has_aux: bool = False,
    names: Sequence[str] = tuple(STATISTICS),
) -> dict:
    """Which statistics differ from those of the gradients themselves, for one cotangent an example and for two."""
    outputs = (lambda params, x: model(params, x)[0]) if has_aux else model
    z = jax.eval_shape(outputs, params, x)
    u = jax.tree.map(lambda leaf: normal(2000, 2, *leaf.shape), z)
    v = jax.tree.map(lambda leaf: normal(2001, *leaf.shape), params)
    count = jax.tree.leaves(z)[0].shape[0]
    weights = {True: normal(2002, 2, count), False: normal(2003, count)}
    cotangents = {True: u, False: jax.tree.map(lambda leaf: leaf[0], u)}

    @jax.jit
    def all_statistics(params, x):
        made = {s: ng.per_example(model, params, x, cotangents[s], budget=budget, has_aux=has_aux) for s in stacks}
        return {s: statistics(made[s], v, weights[s], names) for s in stacks}

    rows = jax.jit(functools.partial(brute, outputs))(params, x, u)
    actual = all_statistics(params, x)
    found = {}
    for s in stacks:
        own = rows if s else jax.tree.map(lambda leaf: leaf[0], rows)
        wrong = differences(actual[s], expected_statistics(own, v, weights[s]), tolerance)
        found |= {f"{'stacked ' if s else ''}{name}": error for name, error in wrong.items()}
    return found


def agree(program: Program) -> None:
    # A gradient with respect to a parameter that was cast is rounded for every example, or not at all.
    options: dict[str, Any] = {"tolerance": 1e-4 if "cast" in program.steps else 1e-10}
    if not COMPILING_SLOWLY.isdisjoint(program.steps):
        options |= {"stacks": (False,), "names": FEW}
    wrong = compare(program.model, program.params, program.x, program.budget, has_aux=program.has_aux, **options)
    assert not wrong, f"{wrong} for {program}"


# Every program is compiled, so a failure is not made smaller here: `make test-slow` does that.
@hypothesis.settings(max_examples=2, phases=[p for p in hypothesis.Phase if p is not hypothesis.Phase.shrink])
@hypothesis.given(programs(tuple(kind for kind in STEPS if kind not in COMPILING_SLOWLY)))
def test_random_programs(program):
    agree(program)


@pytest.mark.slow
@hypothesis.settings(max_examples=60)
@hypothesis.given(programs())
def test_many_random_programs(program):
    agree(program)


# Programs that once were wrong, or were refused.


def scanned_scalars(p, x):
    there, back = np.arange(12.0).reshape(4, 3) / 9, np.arange(12.0).reshape(3, 4) / 9
    return lax.scan(lambda h, s: (jnp.tanh(h @ (s * there)) @ back, None), x, p["s"])[0]


def carried_in_an_inner_loop(p, x):
    """A weight that changes in an inner loop, beside a counter that is the same in every step of the outer one."""

    def layer(x, w):
        step = lambda k, state: (0.9 * state[0], jnp.tanh(state[1] @ state[0] + p["b"][k][None]))
        return lax.fori_loop(0, 2, step, (w, x))[1], None

    return lax.scan(layer, x, p["w"])[0]


def carried_beside_an_index(p, x):
    step = lambda k, state: (0.9 * state[0], jnp.tanh(state[1] @ state[0] @ p["w"][k]))
    return lax.fori_loop(0, 3, step, (p["v"], x))[1]


def index_from_a_parameter(p, x):
    return x @ p["w"][jnp.argmax(p["b"])]


def remat_of_a_constant(p, x):
    return x + jax.checkpoint(lambda v, x: jnp.tanh(np.linspace(1.0, 2.0, 4) @ v))(p["v"], x)[None]


def remat_returns_a_parameter(p, x):
    b, x = jax.checkpoint(lambda b, x: (b, 2 * x))(p["s"], x)
    return x * b[None]


def remat_of_what_only_looks_dependent(p, x):
    """What a loop has stacked up is a constant, though it comes from where the data is."""
    _, seen = lax.scan(lambda c, _: (jnp.tanh(c @ p["v"]), jnp.arange(4.0)), x, None, length=3)
    return x * jnp.sum(jax.checkpoint(lambda w: jnp.sin(seen @ w))(p["w"][0]), axis=0)[None]


def branch_not_taken(p, x):
    """The derivative of the branch that a parameter does not choose is infinite."""
    s = p["s"] - p["s"][:1]
    return lax.cond(s[0] > 0, lambda x: x * jnp.log(s)[None], lambda x: x * s[None], x)


def remat_of_a_branch(p, x):
    """Each example chooses a branch, which reads one parameter in a product and one in a sum."""
    branch = lambda row: row @ p["v"] + p["b"][0]
    chosen = jax.checkpoint(lambda row: lax.cond(row[0] > 0, branch, lambda row: p["s"][0] * row, row))
    return jnp.stack([chosen(row) for row in x])


def remat_in_a_branch(p, x):
    product = jax.checkpoint(lambda row: jnp.tanh(row @ p["v"]))
    return jnp.stack([lax.cond(row[0] > 0, lambda row: product(row) + p["b"][0], jnp.sin, row) for row in x])


def joined(p, x):
    """Two parameters in one product: each has a gradient of its own."""
    return x @ jnp.concatenate([p["v"], p["b"].T], axis=1)


def padded(p, x):
    """Entries of a weight that are not the parameter's."""
    return x @ jnp.pad(p["b"], [(1, 0), (0, 2)], constant_values=0.3)


def complex_numbers(p, x):
    """Products of complex numbers, of which the real part is what the parameter sees."""
    return jnp.real(jnp.fft.fft(x) @ p["v"].astype(complex))


def linear_system(p, x):
    return jnp.linalg.solve(p["v"] @ p["v"].T + 2 * jnp.eye(4), x.T).T


def nothing_used(p, x):
    return 2 * x


def quotient(p, x):
    return p["s"][None] / (1.5 + x**2)


def looked_up(p, x):
    """Twice, with indices of two widths."""
    place = jnp.argmax(x[:, :3], axis=-1)
    return x + p["b"][place] + p["b"][(place + 1).astype(jnp.int32) % 3]


def rolled(p, x):
    """The axis that parts are joined along is a NumPy integer."""
    return jnp.roll(x @ p["v"], 1, axis=1)


def loop_with_checkpoints(p, x):
    """Its backward pass cannot be transposed, for products with a vector."""
    step = lambda c: (c[0] + 1, jnp.tanh(c[1] @ p["v"]))
    return eqxi.while_loop(lambda c: c[0] < 2, step, (0, x), max_steps=2, kind="checkpointed")[1]


FOUND = {
    "scanned_scalars": scanned_scalars,
    "carried_in_an_inner_loop": carried_in_an_inner_loop,
    "carried_beside_an_index": carried_beside_an_index,
    "index_from_a_parameter": index_from_a_parameter,
    "remat_of_a_constant": remat_of_a_constant,
    "remat_returns_a_parameter": remat_returns_a_parameter,
    "remat_of_what_only_looks_dependent": remat_of_what_only_looks_dependent,
    "branch_not_taken": branch_not_taken,
    "remat_of_a_branch": remat_of_a_branch,
    "remat_in_a_branch": remat_in_a_branch,
    "joined": joined,
    "padded": padded,
    "complex_numbers": complex_numbers,
    "linear_system": linear_system,
    "nothing_used": nothing_used,
    "looked_up": looked_up,
    "rolled": rolled,
}


@pytest.mark.slow
def test_products_with_a_loop_that_is_differentiated_once():
    params = {"v": normal(2, 4, 4)}
    assert compare(loop_with_checkpoints, params, normal(5, 3, 4), stacks=(False,), names=["matvec", "rmatvec"]) == {}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FOUND)
def test_programs_that_were_wrong_once(name):
    params = {"w": normal(1, 3, 4, 4), "v": normal(2, 4, 4), "b": normal(3, 3, 4), "s": normal(4, 4)}
    if name == "index_from_a_parameter":
        params["b"] = params["b"][:, 0]
    assert compare(FOUND[name], params, normal(5, 5, 4), stacks=(False,)) == {}


@pytest.mark.parametrize("budget", [64, 130])
def test_examples_that_fill_up_a_chunk_do_not_contribute(budget):
    """Where the data is a divisor, zeros in its place give no number."""
    assert compare(quotient, {"s": normal(1, 4)}, normal(2, 5, 4), budget) == {}


# Precision, derivatives, and transformations around it all.


def mlp(p, x):
    return jnp.tanh(x @ p["w"] + along(p["b"], x @ p["w"])) @ p["v"]


def mlp_case(dtype=None):
    cast = lambda x: x if dtype is None else x.astype(dtype)
    params = {"w": normal(1, 4, 5), "b": normal(2, 5), "v": normal(3, 5, 3)}
    return jax.tree.map(cast, params), cast(normal(4, 6, 4)), cast(normal(5, 6, 3))


def remat_layers(p, x):
    layer = jax.checkpoint(lambda x, own: (x + jnp.tanh(x @ own["w"] + along(own["b"], x)) * p["s"], None))
    return lax.scan(layer, x, {"w": p["w"], "b": p["b"]})[0]


def remat_case():
    return {"w": normal(1, 3, 4, 4), "b": normal(2, 3, 4), "s": normal(3)}, normal(4, 4, 4), normal(5, 4, 4)


@pytest.mark.float32
def test_statistics_of_half_precision_are_in_single_precision():
    params, x, u = mlp_case(jnp.bfloat16)
    v, weights = jax.tree.map(jnp.ones_like, params), normal(6, 6)
    actual = jax.jit(lambda p: statistics(ng.per_example(mlp, p, x, u), v, weights))(params)
    wide = lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
    rows = jax.jit(functools.partial(brute, mlp))(wide(params), wide(x), wide(u)[None])
    expected = expected_statistics(jax.tree.map(lambda leaf: leaf[0], rows), wide(v), weights)
    for name in ("squared_sum", "fourth", "norms", "gram", "rows", "matvec"):
        assert {leaf.dtype for leaf in jax.tree.leaves(actual[name])} == {jnp.dtype(jnp.float32)}, name
    for name in ("gradient", "rmatvec"):
        assert jax.tree.map(lambda leaf: leaf.dtype, actual[name]) == jax.tree.map(lambda leaf: leaf.dtype, params)
    actual = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), actual)
    assert differences(actual, expected, 3e-2) == {}


def number(statistics):
    """One number that depends on all of them."""
    squares = sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(statistics["squared_sum"]))
    gram = statistics["gram"]
    return jnp.stack([squares, jnp.sum(jnp.sin(statistics["norms"])), jnp.trace(gram) + jnp.sum(jnp.sin(gram))])


def safe_statistics(model, params, x, u):
    """From the gradients themselves, with a norm whose derivative at zero is zero."""
    rows = jax.tree.map(lambda leaf: leaf[0], brute(model, params, x, u[None]))
    flat = jnp.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(rows)], axis=1)
    squares = jnp.sum(flat**2, axis=1)
    return {
        "squared_sum": jax.tree.map(lambda leaf: jnp.sum(leaf**2, axis=0), rows),
        "norms": jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1.0)), 0.0),
        "gram": flat @ flat.T,
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ["mlp", "remat_layers"])
def test_statistics_can_be_differentiated(case):
    """With respect to the parameters and the cotangents; one example has no gradient, and its norm no slope."""
    model, (params, x, u) = (mlp, mlp_case()) if case == "mlp" else (remat_layers, remat_case())
    u = u.at[1].set(0.0)

    def ours(params, u):
        made = ng.per_example(model, params, x, u)
        return number({name: getattr(made, name)() for name in ("squared_sum", "norms", "gram")})

    theirs = lambda params, u: number(safe_statistics(model, params, x, u))

    def with_slopes(function):
        """Each of the three numbers, and its derivative."""
        values, pull = jax.vjp(function, params, u)
        return {"values": values} | {f"slope {k}": pull(jnp.eye(3)[k]) for k in range(3)}

    assert (
        differences(jax.jit(with_slopes, static_argnums=0)(ours), jax.jit(with_slopes, static_argnums=0)(theirs), 1e-9)
        == {}
    )
    norms = jax.jit(lambda p: ng.per_example(model, p, x, u).norms())(params)
    assert norms[1] == 0
    assert np.all(norms[np.arange(len(norms)) != 1] > 0)


def test_model_without_data():
    params, u = {"w": normal(1, 3, 4), "b": normal(2, 4)}, normal(3, 4)
    model = lambda p: jnp.tanh(np.ones(3) @ p["w"] + p["b"]) * p["b"]
    (gradient,) = jax.vjp(model, params)[1](u)
    v, weight = jax.tree.map(jnp.ones_like, params), jnp.array([0.7])
    expected = expected_statistics(jax.tree.map(lambda leaf: leaf[None], gradient), v, weight)
    of = lambda p: statistics(ng.per_example(model, p, None, u), v, weight)
    assert differences(jax.jit(of)(params), expected, 1e-12) == {}
    stacked = ng.per_example(model, params, None, jnp.stack([u, 2 * u])).norms()
    np.testing.assert_allclose(stacked, expected["norms"] * np.array([[1.0], [2.0]]))


def test_traced_once():
    """Calls of a compiled program with other numbers do not run the model's Python again."""
    params, x, u = mlp_case()
    runs = []

    def model(p, x):
        runs.append(x.shape)
        return mlp(p, x)

    norms = jax.jit(lambda p, x, u: ng.per_example(model, p, x, u).norms())
    first = norms(params, x, u)
    count = len(runs)
    second, third = norms(params, 2 * x, u), norms(jax.tree.map(jnp.sin, params), x, u)
    assert len(runs) == count
    assert {shape[0] for shape in runs} <= {1, 6}
    assert not np.allclose(first, second) and not np.allclose(first, third)


def test_model_closes_over_traced_arrays():
    """Numbers and indices of the program around it, which are not known while it is traced."""
    params = {"w": normal(1, 3, 4, 4), "b": normal(2, 4)}
    x, shift, index = normal(3, 5, 4), normal(4, 4), jnp.array([2, 0])

    def model(shift, index):
        def run(p, x):
            x = jnp.tanh(x @ p["w"][index[0]] + along(p["b"] * shift, x))
            return jax.checkpoint(lambda x: x @ p["w"][index[1]] + shift[None])(x)

        return run

    known = model(shift, index)
    u, v = normal(5, 5, 4), jax.tree.map(jnp.ones_like, params)
    rows = jax.tree.map(lambda leaf: leaf[0], jax.jit(functools.partial(brute, known))(params, x, u[None]))

    @jax.jit
    def traced(params, x, shift, index, u):
        return statistics(ng.per_example(model(shift, index), params, x, u), v, u[:, 0])

    expected = expected_statistics(rows, v, u[:, 0])
    assert differences(traced(params, x, shift, index, u), expected, 1e-10) == {}


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ["mlp", "remat_layers"])
def test_many_models_at_once(case):
    """`jax.vmap` over a stack of parameters."""
    model, (params, x, u) = (mlp, mlp_case()) if case == "mlp" else (remat_layers, remat_case())
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf, -leaf]), params)

    def of(p):
        made = ng.per_example(model, p, x, u)
        return {"squared_sum": made.squared_sum(), "gram": made.gram(), "rmatvec": made.rmatvec(u[:, 0])}

    together = jax.jit(jax.vmap(of))(stack)
    alone = jax.jit(of)
    for k in range(3):
        member = functools.partial(jax.tree.map, lambda leaf, k=k: leaf[k])
        assert differences(member(together), jax.tree.map(np.asarray, alone(member(stack))), 1e-11) == {}


def test_a_gradient_that_is_not_a_number_has_no_norm():
    """It must not pass for an example without a gradient."""
    x = jnp.ones((3, 4)).at[1].set(0.0)
    norms = jax.jit(lambda w: ng.per_example(lambda w, x: jnp.sqrt(x @ w), w, x, jnp.ones((3, 1))).norms())(
        np.ones((4, 1))
    )
    np.testing.assert_array_equal(np.isnan(norms), [False, True, False])
