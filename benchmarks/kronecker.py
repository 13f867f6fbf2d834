"""What Kronecker factors and their inverses cost, next to a gradient.

`gradient` is a compiled backward pass with given cotangents, forward pass included. `factors` is `kfac` with one sample
an example, drawn inside the program, and `corrected` is `ekfac` in a given basis, its factors not included.
`inverse, factored` damps the factors and inverts them by their Cholesky factors; `inverse, exact` goes through
eigenvectors and damps the product. Both take the metric as an argument. `step` is the three that a natural gradient
needs: factors, their factored inverse, and its product with a gradient that is computed too.

The perceptron is 784-1000-1000-10 on a batch of 512; the convolutional network and the decoder are those of `networks`
(batch 128; 4 layers in a loop, width 128, 32 positions, 500 words, batch 32). Single precision.

kfac-jax and curvlinops are measured by themselves, on the perceptron, each next to the gradient in its own environment:
`factors` is one update of kfac-jax's estimator in its default mode, or curvlinops' operator with one sampled label an
example, with joint biases; `inverses` their factored inverses. The setting up of kfac-jax's estimator, which finds the
layers, is part of what it compiles. PyTorch compiles nothing.

"time / gradient" is the median over rounds of the ratio of two medians of one round, "range" its extremes. Flops are
given where no loop hides them; those inside LAPACK are not counted. "compile" is tracing and compiling.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import networks
import products
from harness import Program, Table, compile_timed, counts, interleaved_times, quantity, slope
from per_example import COLUMNS, cells

import natgrad as ng

ROUNDS = 4
REPEATS = 4
DAMPING = 1e-3
CASES: dict[str, Callable[[], products.Case]] = {
    "perceptron": products.perceptron,
    "convolutional": networks.convolutional,
    "decoder": networks.decoder,
}
WIDTHS = (250, 500, 1000, 2000)
DEPTHS = (2, 4, 8, 16)
ROOT = Path(__file__).parents[1]
PEERS = {
    "kfac-jax": (ROOT / ".venv-kfac-jax" / "bin" / "python", "kfac_jax_factors.py"),
    "curvlinops": (ROOT / ".venv-peers" / "bin" / "python", "curvlinops_factors.py"),
}


def programs(case: products.Case) -> dict[str, Program]:
    model, params, x, _ = case
    z = jax.eval_shape(model, params, x)
    cotangents = jax.random.normal(jax.random.key(1), z.shape, z.dtype)
    key = jax.random.key(0)
    metric = ng.kfac(model, products.GEOMETRY, params, x, key=key)

    def gradient(params, x, cotangents):
        return jax.vjp(lambda params: model(params, x), params)[1](cotangents)[0]

    def factors(params, x, key):
        return ng.kfac(model, products.GEOMETRY, params, x, key=key)

    def corrected(params, x, key, basis):
        return ng.ekfac(model, products.GEOMETRY, params, x, key=key, basis=basis)

    def step(params, x, key, cotangents):
        inverse = factors(params, x, key).inverse(DAMPING, factored=True)
        return inverse.mv(gradient(params, x, cotangents))

    return {
        "gradient": Program(gradient, (params, x, cotangents)),
        "factors": Program(factors, (params, x, key)),
        "corrected": Program(corrected, (params, x, key, _basis(metric))),
        "inverse, factored": Program(lambda metric: metric.inverse(DAMPING, factored=True), (metric,)),
        "inverse, exact": Program(lambda metric: metric.inverse(DAMPING), (metric,)),
        "step": Program(step, (params, x, key, cotangents)),
    }


def _basis(metric: ng.BlockMetric) -> ng.BlockMetric:
    """The metric with its eigenvectors, so that finding them is not measured with what is done with them."""
    return metric.sqrt()


def run(advance: Callable[[float], None]) -> Table:
    rows: list[tuple[str, ...]] = []
    for name, make in CASES.items():
        rows += measured(name, programs(make()))
        advance(0.7 / len(CASES))
    remarks = [
        grows("width", WIDTHS, lambda n: products.perceptron((784, n, n, 10))),
        grows("depth", DEPTHS, lambda n: products.perceptron((784, *(250,) * n, 10))),
    ]
    advance(0.2)
    for name, (python, script) in PEERS.items():
        own, remark = peer(name, python, script)
        rows += own
        remarks.append(remark)
    advance(0.1)
    return Table((*COLUMNS, "flops / gradient", "compile"), rows, remarks)


def measured(model: str, programs: dict[str, Program]) -> list[tuple[str, ...]]:
    compiled = {name: compile_timed(program) for name, program in programs.items()}
    runs = {name: (executable, programs[name].arguments) for name, (executable, _) in compiled.items()}
    rounds = [interleaved_times(runs, REPEATS) for _ in range(ROUNDS)]
    return [cells(name, model, rounds, compiled, hides_loops=model != "perceptron") for name in programs]


def grows(what: str, sizes: tuple[int, ...], make: Callable[[int], products.Case]) -> str:
    """How the factors and their inverse grow, by compilation alone."""
    flops, memory = [], []
    compiling: dict[str, list[float]] = {"factors": [], "inverse, factored": []}
    for size in sizes:
        candidates = programs(make(size))
        for name in compiling:
            executable, spent = compile_timed(candidates[name])
            compiling[name].append(spent)
            if name == "factors":
                operations, _, temporary = counts(executable)
                flops.append(operations)
                memory.append(temporary)
    compilation = lambda k: ", ".join(f"{quantity(own[k], 's')} for `{name}`" for name, own in compiling.items())
    return (
        f"Factors of the perceptron against {what} ({sizes[0]} to {sizes[-1]:,}), slope of the logarithms: flops "
        f"{slope(sizes, flops):.2f}, temporary memory {slope(sizes, memory):.2f}. Compilation takes "
        f"{compilation(0)} at the smallest and {compilation(-1)} at the largest."
    )


def peer(name: str, python: Path, script: str) -> tuple[list[tuple[str, ...]], str]:
    """The figures of another library, from its own environment."""
    if not python.exists():
        return [], f"{name} was not measured: `make bench` installs it into an environment of its own."
    output = subprocess.run(
        [python, ROOT / "benchmarks" / "peers" / script], check=True, capture_output=True, text=True
    )
    report: dict[str, Any] = json.loads(output.stdout)
    compiling = report.get("compile", {})
    rows = [
        (
            f"{name} `{what}`",
            "perceptron",
            f"{report['ratios'][what]:.2f}",
            "-",
            quantity(report["seconds"][what], "s"),
            "-",
            "-",
            "-",
            quantity(compiling[what] + (compiling["setup"] if what == "factors" else 0), "s") if compiling else "-",
        )
        for what in ("factors", "inverses")
    ]
    return rows, f"{name} {report['version']}; a gradient there takes {quantity(report['seconds']['gradient'], 's')}."
