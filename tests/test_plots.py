"""Figures: what they show is what the law says, and they can be drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natgrad as ng
from natgrad import plots
from natgrad.plots import (
    _bregman_gap,
    _contours,
    _function_space,
    _gaussians,
    _matrices,
    _overparametrised,
    _push_and_pull,
)
from natgrad.plots import _rosenbrock_descent as bowl

pytestmark = pytest.mark.users_defaults


@pytest.mark.slow
def test_paths_over_the_rosenbrock_function():
    runs = {name: np.asarray(jax.vmap(bowl.outputs)(jnp.asarray(points))) for name, points in bowl.paths().items()}
    start = runs["natural gradient"][0]
    aside = lambda z: np.abs(z[:, 0] * start[1] - z[:, 1] * start[0]) / (start @ start)
    # Straight to the minimum, and as far with every step as implicit descent says; the natural gradient close by.
    assert aside(runs["descent on the outputs"]).max() < 1e-12
    np.testing.assert_allclose(runs["proximal, outputs"][1:], runs["proximal, outputs"][:-1] / 2, rtol=1e-5, atol=1e-9)
    assert aside(runs["natural gradient"]).max() < 0.03
    assert aside(runs["gradient descent"]).max() > 0.3
    parameters = bowl.paths()["proximal, parameters"]
    implicit = parameters[:-1] - 0.06 * np.asarray(jax.vmap(jax.grad(bowl.cost))(jnp.asarray(parameters[1:])))
    np.testing.assert_allclose(parameters[1:], implicit, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(bowl.parameters)(jnp.asarray(runs["natural gradient"])).T[0, 0], -1.2)


def test_the_table_of_steps():
    table = dict((name.split(",")[0], steps) for name, steps in plots.rosenbrock_steps())
    assert table["natural gradient"] == 2 and table["gradient descent on the outputs"] == 1
    # z shrinks by 1/3 every step from |z|^2 = 24.2.
    assert table["proximal point in the outputs"] == np.ceil(np.log(24.2 / 1e-8) / np.log(9))
    assert table["gradient descent"] > 5000
    assert table["proximal point in the parameters"] < 100


def test_the_metric_is_what_remains_of_the_dissimilarity():
    angles = np.linspace(0, 2 * np.pi, 12)
    for radius in (1e-2, 1e-3):
        points = np.array(_contours.CENTRE) + radius * np.stack([np.cos(angles), np.sin(angles)], axis=-1)
        exact, quadratic = _contours.distances(points)
        np.testing.assert_allclose(exact / quadratic, 1, atol=50 * radius)


@pytest.mark.slow
def test_gaussians():
    for mean, deviation in _gaussians.CENTRES:
        metric = _gaussians.fisher_metric(jnp.array([mean, deviation]))
        np.testing.assert_allclose(metric, np.diag([1, 2]) / deviation**2, rtol=1e-9, atol=1e-12)
    for start in _gaussians.STARTS:
        w = jnp.array(start)
        gradient = jax.grad(_gaussians.cost)(w)
        euclid, fisher = _gaussians.directions(w)
        metric = _gaussians.fisher_metric(w)
        for steepest, own in ((euclid, np.eye(2)), (fisher, metric)):
            # Of unit length, and no other of unit length goes further down.
            np.testing.assert_allclose(steepest @ own @ steepest, 1, rtol=1e-9)
            circle = _gaussians.ellipse(own, (0.0, 0.0))
            assert np.all(circle @ gradient >= gradient @ steepest - 1e-9)


def test_distance_as_functions_and_the_gap_of_bregman():
    gaps, distance = _function_space.gaps()
    np.testing.assert_allclose(distance, np.mean(gaps**2) / 2, rtol=1e-9)
    to, at = jnp.array(_bregman_gap.TO), jnp.array(_bregman_gap.AT)
    np.testing.assert_allclose(_bregman_gap.gap(), _bregman_gap.phi(to) - _bregman_gap.tangent(to), rtol=1e-9)
    np.testing.assert_allclose(_bregman_gap.tangent(at), _bregman_gap.phi(at), rtol=1e-12)


@pytest.mark.slow
def test_when_the_matrices_coincide():
    equal = {s.title.replace("\n", " "): _matrices.differences(s) < 1e-6 for s in _matrices.SITUATIONS}
    hessian, gauss_newton, fisher, empirical, covariance = range(5)
    linear, network, rates, fitted = equal.values()
    assert linear[hessian, gauss_newton] and linear[gauss_newton, fisher] and not linear[fisher, empirical]
    assert network[gauss_newton, fisher] and not network[hessian, gauss_newton]
    assert not rates[gauss_newton, fisher] and not rates[hessian, fisher]
    assert fitted[empirical, covariance] and not linear[empirical, covariance] and fitted[hessian, fisher]


def test_vectors_covectors_and_metrics():
    found = _push_and_pull.objects()
    np.testing.assert_allclose(found["covector"] @ found["pushed"], found["pulled"] @ found["vector"], rtol=1e-12)
    np.testing.assert_allclose(found["metric"], found["jacobian"].T @ found["jacobian"], rtol=1e-12)
    np.testing.assert_allclose(found["pushed"], found["jacobian"] @ found["vector"], rtol=1e-12)
    oval = _gaussians.ellipse(found["metric"], (0.0, 0.0), 0.45)
    np.testing.assert_allclose(np.linalg.norm(oval @ found["jacobian"].T, axis=1), 0.45, rtol=1e-9)


@pytest.mark.slow
def test_overparametrised_examples():
    found = _overparametrised.redundant()
    np.testing.assert_allclose(found["in_w"], [3.0, 3.0], rtol=1e-9)
    np.testing.assert_allclose(found["in_theta"], [4.8, 1.2], rtol=1e-9)
    np.testing.assert_allclose(found["pushed"][0], found["pushed"][1], rtol=1e-9)
    crossing = _overparametrised.crossing()
    np.testing.assert_allclose(crossing["pushed"], [[0.8, 0.4], [0.8, -0.4]], rtol=1e-9, atol=1e-12)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", plots.FIGURES)
def test_figures_are_drawn_in_the_dark(name, tmp_path):
    """In the light they are drawn by the page of figures."""
    figure = plots.FIGURES[name]("dark")
    figure.savefig(tmp_path / "figure.svg")
    assert figure.get_facecolor()[:3] < (0.2, 0.2, 0.2)
    text = (tmp_path / "figure.svg").read_text()
    assert text.count("<path") > 20
    for axes in figure.axes:
        for line in axes.lines:
            assert np.all(np.isfinite(line.get_xydata()))


def test_files_and_errors(tmp_path):
    paths = plots.save_figures(["bregman"], tmp_path / "new")
    assert sorted(path.name for path in paths) == [
        "bregman-dark.png",
        "bregman-dark.svg",
        "bregman-light.png",
        "bregman-light.svg",
    ]
    assert all(path.stat().st_size > 5000 for path in paths)
    with pytest.raises(ValueError, match="There is no figure named nothing. Choose from rosenbrock"):
        plots.save_figures(["nothing"], tmp_path)
    with pytest.raises(ValueError, match="There is no theme `sepia`"):
        plots.bregman("sepia")


def test_the_command_line(tmp_path):
    from typer.testing import CliRunner

    from natgrad.cli import app

    run = lambda *arguments: CliRunner().invoke(app, list(arguments))
    done = run("figures", "bregman", "--out", str(tmp_path))
    assert done.exit_code == 0 and "4 files" in done.output and (tmp_path / "bregman-dark.svg").exists()
    assert run("--version").output == f"natgrad {ng.__version__}\n"
    assert run("figures", "--list").output.split() == list(plots.FIGURES)
    wrong = run("figures", "nothing")
    assert wrong.exit_code == 2 and "There is no figure named nothing" in wrong.output
    assert "Examples" in run("figures", "--help").output
