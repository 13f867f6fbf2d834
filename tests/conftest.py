import contextlib
import itertools
import os

import hypothesis
import jax
import pytest

pytest.register_assert_rewrite("helpers")

hypothesis.settings.register_profile(
    "natgrad",
    deadline=None,  # the first example pays for the compilation
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("natgrad")


# Long cases of laws of which the others run in `make test`: by file and test, the cases that wait for `make test-slow`.
SLOW_CASES = {
    "test_family_laws.py": {
        "": "dirichlet gammas product negative_binomial gaussian_precision",
        "test_fisher_is_the_covariance_of_statistics_and_of_scores": (
            "poisson gaussian_mean_matrix geometric gaussian"
        ),
        "test_moments_are_the_gradient_of_the_log_partition": "gaussian categoricals",
        "test_score_is_statistics_minus_moments": "gaussian categoricals poisson",
        "test_hessian_of_the_negative_log_likelihood_is_the_fisher_whatever_the_data": "bernoullis",
    },
    "test_geometry_laws.py": {
        "": "dirichlet gammas product_family negative_binomial gaussian_precision",
        "test_metric_is_the_hessian_of_the_dissimilarity_at_coincidence": "beta",
    },
    "test_family_extremes.py": {
        "test_log_partition_moments_and_fisher": (
            "float32-beta float32-dirichlet float32-gamma float32-gaussian float64-beta float64-gamma"
        ),
        "test_float32_agrees_with_float64": "beta dirichlet diagonal_gaussian",
    },
    "test_kfac_exact.py": {
        "test_deep_linear_networks": "reduce-True expand-False reduce-False",
        "test_convolutions_are_exact_where_they_should_be": "grouped transposed dilated",
        "test_factors_are_those_of_curvlinops": "seq_ce conv_ce",
    },
    "test_kfac_laws.py": {"test_corrected_eigenvalues_are_nearest_and_keep_the_trace": "tied_mixed"},
    "test_per_example.py": {
        "test_statistics_equal_brute_force": "pinn transformer_tied",
        "test_a_small_budget_changes_nothing": "convnet",
    },
    "test_diagonal.py": {"test_exact_diagonal_and_gram_equal_brute_force": "charted attention dissimilar"},
    "test_optimiser_laws.py": {
        "test_damping_relative_to_the_diagonal_knows_no_units": "exact",
        "test_a_weight_of_two_is_an_example_given_twice": "exact",
    },
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        tests = SLOW_CASES.get(item.path.name, {})
        cases = " ".join([tests.get("", ""), tests.get(getattr(item, "originalname", ""), "")]).split()
        if hasattr(item, "callspec") and item.callspec.id in cases:
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def arithmetic(request):
    """Float64 without implicit promotion, unless the test is marked otherwise."""
    marker = request.node.get_closest_marker
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(not marker("float32")))
        if not marker("users_defaults"):
            stack.enter_context(jax.numpy_dtype_promotion("strict"))
            stack.enter_context(jax.numpy_rank_promotion("raise"))
        yield


@pytest.fixture
def getkey():
    """A function whose every call returns a new key; the sequence is the same in each test."""
    seeds = itertools.count(2024)
    return lambda: jax.random.key(next(seeds))
