"""What a product with a metric costs, next to a gradient.

`gradient` is a compiled backward pass with given cotangents, forward pass included, and `forward` the forward pass on
its own. The metrics are built once and are arguments of the compiled product, so that what their linearisation stored
is read and not computed again: `pullback` of the Fisher geometry, `gauss_newton` and `hessian` of the cross-entropy.
`by hand` is the product of `pullback` in three lines of JAX, which store nothing and go forward again each time.

The perceptron is 784-1000-1000-10 with ReLU on a batch of 512. A gradient takes eight products with matrices of its
size, a metric product ten: counting their operations gives a ratio of 1.22. The transformer has 4 layers in a
`lax.scan`, width 128, 4 heads, 32 positions, 500 words and a batch of 32. Single precision throughout.

XLA counts the body of a loop once, however often it runs, so flops are those of the program with the layers unrolled.
Times and temporary memory belong to the program with the loop. Not among the temporary memory is what a metric stores,
which is the last column: parameters, data, and about what a backward pass keeps while it runs.

"time / gradient" is the median over rounds of the ratio of two medians of one round, and "range" its extremes; "time"
pools all rounds, so that on a loaded machine the quotient of two times differs from it. By the clock a product of the
transformer is cheaper than its gradient although it has more operations. A likely reason, not isolated here: the
gradient also goes forward and writes the 89 MB that the product only reads.
"""

from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
from harness import Program, Table, compile_timed, counts, interleaved_times, median_and_quartiles, quantity

import natgrad as ng

# A ratio is that of two medians of one round; the table gives the middle round and the range of all.
ROUNDS = 4
REPEATS = 8
GEOMETRY = ng.Fisher(ng.Categorical())


class Case(NamedTuple):
    """A model, its parameters, a batch and its labels."""

    model: Callable
    params: Any
    x: jax.Array
    y: jax.Array


def perceptron(sizes: tuple[int, ...] = (784, 1000, 1000, 10), batch: int = 512) -> Case:
    keys = jax.random.split(jax.random.key(0), len(sizes) + 1)
    params = [
        {"w": jax.random.normal(key, (m, n)) * (2 / m) ** 0.5, "b": jnp.zeros(n)}
        for key, m, n in zip(keys, sizes, sizes[1:], strict=False)
    ]

    def model(params, x):
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return x @ params[-1]["w"] + params[-1]["b"]

    x = jax.random.normal(keys[-2], (batch, sizes[0]))
    return Case(model, params, x, jax.random.randint(keys[-1], (batch,), 0, sizes[-1]))


def transformer(
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    positions: int = 32,
    words: int = 500,
    batch: int = 32,
    *,
    unroll: bool = False,
) -> Case:
    keys = iter(jax.random.split(jax.random.key(0), 9))
    matrix = lambda *shape: jax.random.normal(next(keys), shape) * shape[-2] ** -0.5
    params = {
        "words": matrix(words, width),
        "places": matrix(positions, width),
        "blocks": {
            "qkv": matrix(layers, width, 3 * width),
            "join": matrix(layers, width, width),
            "up": matrix(layers, width, 4 * width),
            "down": matrix(layers, 4 * width, width),
        },
        "head": matrix(width, words),
    }
    causal = jnp.tril(jnp.ones((positions, positions), bool))

    def normalise(h):
        h = h - jnp.mean(h, axis=-1, keepdims=True)
        return h * jax.lax.rsqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-5)

    def attend(h, block):
        split = (normalise(h) @ block["qkv"]).reshape(*h.shape[:2], 3, heads, -1)
        q, k, v = (split[:, :, i] for i in range(3))
        scores = jnp.einsum("nthd,nshd->nhts", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
        return jnp.einsum("nhts,nshd->nthd", weights, v).reshape(h.shape) @ block["join"]

    def layer(h, block):
        h = h + attend(h, block)
        return h + jax.nn.gelu(normalise(h) @ block["up"]) @ block["down"], None

    def model(params, x):
        h = params["words"][x] + params["places"]
        h, _ = jax.lax.scan(layer, h, params["blocks"], unroll=unroll)
        return normalise(h) @ params["head"]

    x, y = jax.random.randint(next(keys), (2, batch, positions), 0, words)
    return Case(model, params, x, y)


# A model to run, and one without loops to count operations in.
CASES = {
    "perceptron": (perceptron, perceptron),
    "transformer": (transformer, lambda: transformer(unroll=True)),
}


def built(function: Callable, *arguments: Any) -> Any:
    """Compiled, since a metric built operation by operation takes longer than all that follows."""
    return jax.jit(function)(*arguments)


def programs(case: Case, build: Callable = built) -> dict[str, Program]:
    model, params, x, y = case
    z_key, *keys = jax.random.split(jax.random.key(1), 1 + len(jax.tree.leaves(params)))
    cotangents = jax.random.normal(z_key, jax.eval_shape(model, params, x).shape)
    keys = jax.tree.unflatten(jax.tree.structure(params), keys)
    v = jax.tree.map(lambda key, leaf: jax.random.normal(key, leaf.shape), keys, params)
    loss = lambda z, y: -ng.Categorical().log_prob(z, y)
    cost = lambda params, x, y: jnp.mean(jax.vmap(loss)(model(params, x), y))

    def gradient(params, x, cotangents):
        return jax.vjp(lambda params: model(params, x), params)[1](cotangents)[0]

    def by_hand(params, x, v):
        z, dz = jax.jvp(lambda params: model(params, x), (params,), (v,))
        return gradient(params, x, jax.vmap(GEOMETRY.metric_mv)(z, dz) / len(x))

    product = lambda metric, v: metric.mv(v)
    pullback = build(lambda params, x: ng.pullback(model, GEOMETRY, params, x), params, x)
    gauss_newton = build(lambda params, x, y: ng.gauss_newton(model, loss, params, x, y), params, x, y)
    hessian = build(lambda params, x, y: ng.hessian(cost, params, x, y), params, x, y)
    return {
        "forward": Program(model, (params, x)),
        "gradient": Program(gradient, (params, x, cotangents)),
        "pullback": Program(product, (pullback, v)),
        "gauss_newton": Program(product, (gauss_newton, v)),
        "hessian": Program(product, (hessian, v)),
        "by hand": Program(by_hand, (params, x, v)),
    }


def flops(case: Case) -> dict[str, float]:
    """Operations of each program, by shapes alone: nothing is run."""
    return {
        name: counts(compile_timed(program)[0])[0] for name, program in programs(case, build=jax.eval_shape).items()
    }


def run(advance: Callable[[float], None]) -> Table:
    rows = []
    for name, (make, make_counted) in CASES.items():
        counted = flops(make_counted())
        advance(1 / 3 / len(CASES))
        rows += measured(name, programs(make()), counted, lambda fraction: advance(2 / 3 * fraction / len(CASES)))
    columns = ("operation", "model", "time", "quartiles", "time / gradient", "range", "flops / gradient")
    return Table((*columns, "flops / forward", "temporary", "compile", "stored"), rows)


def measured(model: str, programs: dict[str, Program], flops: dict[str, float], advance: Callable) -> list[tuple]:
    compiled = {}
    for name, program in programs.items():
        compiled[name] = compile_timed(program)
        advance(0.5 / len(programs))
    runs = {name: (executable, programs[name].arguments) for name, (executable, _) in compiled.items()}
    rounds = []
    for _ in range(ROUNDS):
        rounds.append(interleaved_times(runs, REPEATS))
        advance(0.5 / ROUNDS)
    rows = []
    for name, (executable, spent) in compiled.items():
        seconds, quartiles = median_and_quartiles([time for times in rounds for time in times[name]])
        ratios = [median(times[name]) / median(times["gradient"]) for times in rounds]
        rows.append(
            (
                f"`{name}`",
                model,
                quantity(seconds, "s"),
                " – ".join(quantity(time, "s") for time in quartiles),
                f"{median(ratios):.2f}",
                f"{min(ratios):.2f} – {max(ratios):.2f}",
                f"{flops[name] / flops['gradient']:.3f}",
                f"{flops[name] / flops['forward']:.2f}",
                quantity(counts(executable)[2], "B"),
                quantity(spent, "s"),
                stored(programs[name].arguments[0]),
            )
        )
    return rows


def stored(metric: Any) -> str:
    """The size of all arrays in a metric, which include the parameters."""
    if not isinstance(metric, lx.AbstractLinearOperator):
        return "-"
    return quantity(sum(leaf.nbytes for leaf in jax.tree.leaves(metric)), "B")
