"""What statistics of single examples' gradients cost, next to a gradient.

`gradient` is a compiled backward pass with given cotangents, forward pass included. `diagonal` is the sampled diagonal
of the Fisher metric, one pseudo-gradient an example, drawn inside the program; `squared_sum`, `norms` and `gram` are
those of `per_example` for given cotangents. `vmap` and `scan` are the sum of squares from gradients that are formed:
all at once, or one example after the other. BackPACK is measured by itself, in PyTorch, next to the gradient there:
`SumGradSquared` is a sum of squares, `DiagGGNMC` a sampled diagonal (one sample), `BatchL2Grad` the norms. Its memory
is the peak of resident memory beyond that of its gradient, and so not comparable in kind.

The perceptron is 784-1000-1000-10 on a batch of 512, the convolutional network and the decoder are those of
`networks` (batch 128; 4 layers, width 128, 32 positions, 500 words, batch 32), and the rematerialised decoder has 12
layers under `jax.checkpoint`, 64 positions, 50 words and a batch of 16. Single precision.

"time / gradient" is the median over rounds of the ratio of two medians of one round, "range" its extremes. Flops are
given where no loop hides them: XLA counts the body of a loop once. "compile" is tracing and compiling.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import networks
import products
from harness import Program, Table, compile_timed, counts, interleaved_times, quantity, slope

import natgrad as ng

ROUNDS = 4
REPEATS = 5
CASES: dict[str, Callable[[], products.Case]] = {
    "perceptron": products.perceptron,
    "convolutional": networks.convolutional,
    "decoder": networks.decoder,
    "rematerialised": lambda: networks.decoder(12, positions=64, words=50, batch=16, is_rematerialised=True),
}
BATCHES = (128, 256, 512, 1024)
WIDTHS = (250, 500, 1000, 2000)
PEERS = Path(__file__).parents[1] / ".venv-peers" / "bin" / "python"
COLUMNS = ("operation", "model", "time / gradient", "range", "time", "temporary", "memory / gradient")


def programs(case: products.Case) -> dict[str, Program]:
    model, params, x, _ = case
    z = jax.eval_shape(model, params, x)
    cotangents = jax.random.normal(jax.random.key(1), z.shape, z.dtype)

    def gradient(params, x, cotangents):
        return jax.vjp(lambda params: model(params, x), params)[1](cotangents)[0]

    def statistic(name):
        return lambda params, x, cotangents: getattr(ng.per_example(model, params, x, cotangents), name)()

    def diagonal(params, x, cotangents):
        del cotangents
        return ng.diagonal(model, products.GEOMETRY, params, x, key=jax.random.key(0)).entries

    functions = {"gradient": gradient, "diagonal": diagonal}
    functions |= {name: statistic(name) for name in ("squared_sum", "norms", "gram")}
    functions |= {"vmap": by_vmap(model), "scan": by_scan(model)}
    return {name: Program(function, (params, x, cotangents)) for name, function in functions.items()}


def of_one(model: Callable) -> Callable:
    def gradient(params, x, cotangent):
        return jax.vjp(lambda params: model(params, x[None])[0], params)[1](cotangent)[0]

    return gradient


def by_vmap(model: Callable) -> Callable:
    rows = jax.vmap(of_one(model), in_axes=(None, 0, 0))
    return lambda params, x, cotangents: jax.tree.map(lambda g: jnp.sum(g**2, axis=0), rows(params, x, cotangents))


def by_scan(model: Callable) -> Callable:
    def squares(params, x, cotangents):
        def step(total, one):
            return jax.tree.map(lambda t, g: t + g**2, total, of_one(model)(params, *one)), None

        return jax.lax.scan(step, jax.tree.map(jnp.zeros_like, params), (x, cotangents))[0]

    return squares


def run(advance: Callable[[float], None]) -> Table:
    rows: list[tuple[str, ...]] = []
    for name, make in CASES.items():
        rows += measured(name, programs(make()))
        advance(0.8 / len(CASES))
    peers, remark = backpack()
    growth = [grows("batch", BATCHES, lambda n: products.perceptron(batch=n))]
    growth.append(grows("width", WIDTHS, lambda n: products.perceptron((784, n, n, 10))))
    advance(0.2)
    return Table((*COLUMNS, "flops / gradient", "compile"), [*rows, *peers], [*growth, remark])


def measured(model: str, programs: dict[str, Program]) -> list[tuple[str, ...]]:
    compiled = {name: compile_timed(program) for name, program in programs.items()}
    runs = {name: (executable, programs[name].arguments) for name, (executable, _) in compiled.items()}
    slow = {name: run for name, run in runs.items() if name in ("vmap", "scan")}
    quick = {name: run for name, run in runs.items() if name not in slow}
    rounds = [interleaved_times(quick, REPEATS) for _ in range(ROUNDS)]
    baseline = {"gradient": runs["gradient"]}
    by_hand = [interleaved_times({**baseline, **slow}, 1) for _ in range(2)]
    return [
        cells(
            name,
            model,
            by_hand if name in slow else rounds,
            compiled,
            hides_loops=name == "scan" or model != "perceptron",
        )
        for name in programs
    ]


def cells(name: str, model: str, rounds: list, compiled: dict[str, Any], *, hides_loops: bool) -> tuple[str, ...]:
    ratios = [median(times[name]) / median(times["gradient"]) for times in rounds]
    (flops, _, memory), (flops_of_gradient, _, memory_of_gradient) = (
        counts(compiled[which][0]) for which in (name, "gradient")
    )
    return (
        f"`{name}`",
        model,
        f"{median(ratios):.2f}",
        f"{min(ratios):.2f} – {max(ratios):.2f}",
        quantity(median([time for times in rounds for time in times[name]]), "s"),
        quantity(memory, "B"),
        f"{memory / memory_of_gradient:.2f}",
        "-" if hides_loops else f"{flops / flops_of_gradient:.3f}",
        quantity(compiled[name][1], "s"),
    )


def grows(what: str, sizes: tuple[int, ...], make: Callable[[int], products.Case]) -> str:
    """How temporary memory grows, by compilation alone."""
    memory: dict[str, list[float]] = {"gradient": [], "squared_sum": [], "vmap": []}
    for size in sizes:
        candidates = programs(make(size))
        for name in memory:
            memory[name].append(counts(compile_timed(candidates[name])[0])[2])
    slopes = ", ".join(f"`{name}` {slope(sizes, values):.2f}" for name, values in memory.items())
    largest = ", ".join(f"`{name}` {quantity(values[-1], 'B')}" for name, values in memory.items())
    return (
        f"Temporary memory of the perceptron against {what} ({sizes[0]} to {sizes[-1]:,}), slope of the logarithms: "
        f"{slopes}. At the largest: {largest}."
    )


def backpack() -> tuple[list[tuple[str, ...]], str]:
    """The figures of BackPACK, from its own environment."""
    if not PEERS.exists():
        return [], "BackPACK was not measured: `make bench` installs it into an environment of its own."
    script = Path(__file__).parent / "peers" / "backpack_statistics.py"
    report = json.loads(subprocess.run([PEERS, script], check=True, capture_output=True, text=True).stdout)
    rows = [
        (
            f"BackPACK `{name}`",
            model,
            f"{result['ratio']:.2f}",
            "-",
            quantity(result["seconds"], "s"),
            "-"
            if result["extra_resident_bytes"] is None
            else f"+ {quantity(max(result['extra_resident_bytes'], 0), 'B')}",
            "-",
            "-",
            "-",
        )
        for model, results in report["results"].items()
        for name, result in results.items()
    ]
    return rows, f"BackPACK {report['backpack']} with PyTorch {report['torch']} on {report['threads']} threads."
