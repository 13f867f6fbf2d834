"""Long cases of laws of which the others run in `make test`: by file and test, those that wait for `make test-slow`.
Under the empty name stand cases of every test in a file."""

SLOW_CASES = {
    "test_family_laws.py": {
        "": "dirichlet gammas product negative_binomial gaussian_precision gaussian minimal_categorical geometric",
        "test_fisher_is_the_covariance_of_statistics_and_of_scores": (
            "poisson gaussian_mean_matrix geometric gaussian categoricals"
        ),
        "test_moments_are_the_gradient_of_the_log_partition": "gaussian categoricals",
        "test_score_is_statistics_minus_moments": "gaussian categoricals poisson bernoullis",
        "test_hessian_of_the_negative_log_likelihood_is_the_fisher_whatever_the_data": (
            "bernoullis gaussian geometric categoricals"
        ),
        "test_divergence_entropy_and_dual_are_expectations": "poisson",
    },
    "test_geometry_laws.py": {
        "": "dirichlet gammas product_family negative_binomial gaussian_precision beta diagonal_gaussian",
        "test_metric_is_the_hessian_of_the_dissimilarity_at_coincidence": "beta",
        "test_samples_have_mean_zero_and_the_metric_for_a_covariance": "beta",
        "test_product_matrix_and_factor_agree": "beta",
    },
    "test_family_extremes.py": {
        "test_log_partition_moments_and_fisher": (
            "float32-beta float32-dirichlet float32-gamma float32-gaussian float64-beta float64-gamma "
            "float64-dirichlet float64-negative_binomial float32-negative_binomial float32-gaussian_precision"
        ),
        "test_float32_agrees_with_float64": "beta dirichlet diagonal_gaussian negative_binomial product",
        "test_entropy": "float32-dirichlet float64-beta float64-gamma float32-beta float32-gamma",
    },
    "test_kfac_exact.py": {
        "test_deep_linear_networks": "reduce-True expand-False reduce-False",
        "test_convolutions_are_exact_where_they_should_be": "grouped transposed dilated",
        "test_factors_are_those_of_curvlinops": "seq_ce conv_ce",
    },
    "test_family_scipy.py": {"test_log_prob_and_entropy_are_those_of_scipy": "beta dirichlet product"},
    "test_block_metric.py": {"test_algebra_is_that_of_the_dense_matrix": "ekfac"},
    "test_kfac_laws.py": {
        "test_corrected_eigenvalues_are_nearest_and_keep_the_trace": "tied_mixed",
        "test_unusual_uses_are_exact_for_one_example": "negative",
    },
    "test_metric_dense.py": {
        "test_empirical_fisher_is_the_covariance_plus_the_square_of_the_mean": "recurrent attention",
        "test_hessian_is_the_fisher_plus_a_residual_term": "attention",
    },
    "test_solve_laws.py": {"test_all_solvers_agree_with_dense_algebra": "recurrent attention convolution"},
    "test_plots.py": {"test_figures_are_drawn_in_the_dark": "rosenbrock overparametrised"},
    "test_per_example.py": {
        "test_statistics_equal_brute_force": (
            "pinn transformer_tied eqx_conv odd convnet deq_opaque batched_einsum masked_lookup fori_layers tied_scan"
        ),
        "test_statistics_formed_in_the_backward_pass_equal_brute_force": "scan_layers_remat_reverse deep_remat",
        "test_single_precision": "tied_mixed",
        "test_a_small_budget_changes_nothing": "convnet",
    },
    "test_per_example_programs.py": {
        "test_statistics_can_be_differentiated": "remat_layers",
        "test_many_models_at_once": "remat_layers",
    },
    "test_diagonal.py": {
        "test_exact_diagonal_and_gram_equal_brute_force": "charted attention dissimilar recurrent convolution"
    },
    "test_proximal_laws.py": {
        "test_mirror_descent_moves_the_dual_coordinates": (
            "beta dirichlet gammas gaussian gaussian_precision product negative_binomial geometric exponential "
            "diagonal_gaussian minimal_categorical gaussian_mean_matrix bernoullis categoricals"
        ),
        "test_the_natural_gradient_of_an_expectation_is_the_gradient_in_moments": (
            "beta dirichlet gammas product diagonal_gaussian gaussian_precision negative_binomial geometric gaussian"
        ),
        "test_steps_agree_to_first_order_as_the_strength_grows": (
            "gaussian gammas dissimilarity minimal_categorical model bregman"
        ),
        "test_a_proximal_point_solves_the_trust_region_of_its_own_radius": (
            "gaussian gammas minimal_categorical model dissimilarity dual bregman"
        ),
    },
    "test_online_laws.py": {
        "test_the_estimate_of_a_stream_is_that_of_the_batch_after_every_example": (
            "beta dirichlet gammas product negative_binomial diagonal_gaussian categoricals minimal_categorical "
            "gaussian_precision geometric gaussian_mean_matrix gaussian bernoullis"
        ),
        "test_online_natural_gradient_is_the_extended_kalman_filter": (
            "gaussian-1.0-0.05 gaussian-0.9-0.0 bernoulli-1.0-0.05 poisson-0.9-0.0 poisson-1.0-0.05 "
            "categorical-0.9-0.0 poisson-1.0-0.0"
        ),
    },
    "test_optimiser_runs.py": {"test_small_batches_by_scan_and_after_a_bad_one": "Diagonal"},
    "test_optimiser_laws.py": {
        "test_damping_relative_to_the_diagonal_knows_no_units": "exact kfac",
        "test_a_weight_of_two_is_an_example_given_twice": "exact kfac",
        "test_a_step_solves_with_the_damped_metric": "exact conjugate_gradients",
        "test_factors_of_terms_have_the_traces_of_their_sum": "KFAC",
    },
}
