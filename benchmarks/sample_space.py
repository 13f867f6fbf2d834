"""An exact, damped natural gradient of a perceptron with 1.8 million parameters.

The gradient of the cross-entropy of ten classes, solved with the Fisher metric by `SampleSpace()` on the perceptron
784-1000-1000-10 of `products`: damping 0.01, single precision. The matrix of all parameters would have 3.2 × 10¹²
entries, 13 TB. In the space of samples there are 10 rows for each of N examples, and a matrix of that size is
factorised.

The matrix, R Rᵀ, is formed from the factors of the gradients: one forward pass, one backward pass with ten cotangents
an example, and inner products of inputs and of cotangents at each layer. No row of R is formed, so temporary memory is
that of the matrix itself and of the cotangents. Both the products and the factorisation grow with powers of N above
one, the latter with N³. Each size was run once.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import products
from harness import Program, Table, compile_timed, counts, quantity, slope, time_calls

import natgrad as ng

SIZES = (16, 64, 256, 512)
DAMPING = 1e-2


def programs(case: products.Case) -> dict[str, Program]:
    model, params, x, y = case
    loss = lambda z, y: -ng.Categorical().log_prob(z, y)

    def gradient(params, x, y):
        return jax.grad(lambda params: jnp.mean(jax.vmap(loss)(model(params, x), y)))(params)

    def natural_gradient(params, x, y):
        metric = ng.pullback(model, products.GEOMETRY, params, x)
        return ng.solve(metric, gradient(params, x, y), damping=DAMPING, solver=ng.SampleSpace())

    arguments = params, x, y
    return {"gradient": Program(gradient, arguments), "natural_gradient": Program(natural_gradient, arguments)}


def run(advance: Callable[[float], None], sizes: tuple[int, ...] = SIZES) -> Table:
    rows, seconds = [], []
    for size in sizes:
        cells, spent = measured(size, programs(products.perceptron(batch=size)))
        rows.append(cells)
        seconds.append(spent)
        advance(size**2 / sum(size**2 for size in sizes))
    columns = ("N", "rows", "time", "time / gradient", "temporary", "residual", "outcome", "compile")
    return Table(columns, rows, [f"Slope of the logarithm of the time against that of N: {slope(sizes, seconds):.2f}."])


def measured(size: int, programs: dict[str, Program]) -> tuple[tuple[str, ...], float]:
    (gradient, _), (natural, compile_seconds) = (compile_timed(program) for program in programs.values())
    arguments = programs["gradient"].arguments
    gradient_seconds = min(time_calls(gradient, arguments, number=5) for _ in range(3))
    solution, seconds = time_once(natural, arguments)
    cells = (
        f"{size}",
        f"{solution.stats['rows']:,}",
        quantity(seconds, "s"),
        f"{seconds / gradient_seconds:,.0f}",
        quantity(counts(natural)[2], "B"),
        f"{solution.stats['residual']:.1e}",
        "successful" if solution.result == ng.RESULTS.successful else "failed",
        quantity(compile_seconds, "s"),
    )
    return cells, seconds


def time_once(executable: Callable, arguments: tuple) -> tuple[Any, float]:
    start = time.perf_counter()
    result = jax.block_until_ready(executable(*arguments))
    return result, time.perf_counter() - start
