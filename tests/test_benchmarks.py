"""The benchmarks run, and count what they say they count."""

import importlib
from pathlib import Path

import jax.numpy as jnp
import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    """A function that imports one module of the benchmarks."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


def test_every_benchmark_has_a_table_among_the_results(benchmark):
    run = benchmark("run")
    modules = {path.stem for path in FOLDER.glob("*.py")} - {"run", "harness"}
    assert modules == set(run.BENCHMARKS)
    assert set(run.previous_sections()) == modules


def test_counts_of_a_matrix_product(benchmark):
    harness = benchmark("harness")
    size = 64
    program = harness.Program(lambda a, b: a @ b, (jnp.ones((size, size)), jnp.ones((size, size))))
    cost = harness.measure({"product": program}, repeats=2)["product"]
    assert cost.flops == pytest.approx(2 * size**3, rel=0.01)
    assert cost.bytes_accessed >= 3 * size**2 * 8
    assert cost.seconds > 0


def test_slope_of_a_power_law(benchmark):
    harness = benchmark("harness")
    sizes = [10, 100, 1000]
    assert harness.slope(sizes, [7 * size**2 for size in sizes]) == pytest.approx(2)


def test_products_with_the_categorical_metric_are_linear_in_the_classes(benchmark):
    """By XLA's count of operations, which does not depend on the machine."""
    harness, categorical = benchmark("harness"), benchmark("categorical")
    sizes = [1000, 10_000]
    compiled = [harness.compile_timed(categorical.programs(size)["metric_mv"])[0] for size in sizes]
    assert harness.slope(sizes, [harness.counts(executable)[0] for executable in compiled]) < 1.1
