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
    modules = {path.stem for path in FOLDER.glob("*.py")} - {"run", "harness", "networks"}
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


@pytest.mark.slow
@pytest.mark.float32
@pytest.mark.users_defaults
def test_a_product_costs_about_a_gradient(benchmark):
    """Erratum E28, on a smaller perceptron: four forward passes by hand, three from the stored derivative."""
    products = benchmark("products")
    flops = products.flops(products.perceptron((64, 128, 128, 10), batch=64))
    assert flops["pullback"] < 1.3 * flops["gradient"]
    assert flops["pullback"] == pytest.approx(3.1 * flops["forward"], rel=0.1)
    assert flops["by hand"] == pytest.approx(4.1 * flops["forward"], rel=0.1)


@pytest.mark.slow
@pytest.mark.float32
@pytest.mark.users_defaults
def test_loops_are_counted_unrolled(benchmark):
    """XLA counts the body of a loop once, so a scan of two layers seems as cheap as one layer."""
    harness, products = benchmark("harness"), benchmark("products")
    sizes = {"width": 16, "heads": 2, "positions": 8, "words": 16, "batch": 4}

    def flops(**options):
        case = products.transformer(**sizes, **options)
        return harness.counts(harness.compile_timed(harness.Program(case.model, (case.params, case.x)))[0])[0]

    one, two = flops(layers=1, unroll=True), flops(layers=2, unroll=True)
    assert two > 1.5 * one
    assert flops(layers=2) < 1.2 * one


@pytest.mark.slow
@pytest.mark.float32
@pytest.mark.users_defaults
def test_sample_space_is_solved(benchmark):
    sample_space, products = benchmark("sample_space"), benchmark("products")
    cells, seconds = sample_space.measured(3, sample_space.programs(products.perceptron((8, 16, 4), batch=3)))
    assert cells[:2] == ("3", "12")
    assert "successful" in cells
    assert seconds > 0


def temporary_bytes(benchmark, case, names):
    harness, per_example = benchmark("harness"), benchmark("per_example")
    programs = per_example.programs(case)
    return [harness.counts(harness.compile_timed(programs[name])[0])[2] for name in names]


@pytest.mark.float32
@pytest.mark.users_defaults
def test_memory_of_statistics_does_not_grow_with_batch_times_parameters(benchmark):
    products = benchmark("products")
    for batch in (64, 256):
        case = products.perceptron((64, 128, 128, 10), batch=batch)
        gradient, squares, formed = temporary_bytes(benchmark, case, ["gradient", "squared_sum", "vmap"])
        assert squares <= 2 * gradient
        assert formed > 10 * gradient


@pytest.mark.slow
@pytest.mark.float32
@pytest.mark.users_defaults
def test_rematerialisation_keeps_its_saving(benchmark):
    """Recorded, the inputs of all layers would take several times the memory of the gradient."""
    networks = benchmark("networks")
    case = networks.decoder(8, width=32, heads=2, positions=32, words=20, batch=8, is_rematerialised=True)
    gradient, diagonal = temporary_bytes(benchmark, case, ["gradient", "diagonal"])
    assert diagonal <= 2 * gradient
