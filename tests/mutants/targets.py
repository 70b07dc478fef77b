"""What is broken, and which checks of the contract must notice it."""

from __future__ import annotations

LIKELIHOODS = {
    "Gaussian": ["log_prob", "fisher", "convolve", "rescaled", "log_prior"],
    "HeteroscedasticGaussian": ["log_prob", "fisher", "noise_variance", "convolve"],
    "Categorical": ["fisher", "fisher_sum", "fisher_diagonal", "fisher_product", "fisher_root", "random_slope"],
    "Bernoulli": ["log_prob", "fisher", "off", "uncertainty"],
    "HeteroscedasticCategorical": ["_noisy", "log_probs", "fisher_root"],
}
DEFINITIONS = {
    "HeteroscedasticCategorical": ["definition/noisy logits"],
    "HeteroscedasticGaussian": ["definition/missing targets", "definition/huge noise"],
}
PRIORS = {
    "Normal": ["log_prob", "gradient", "add_gradient", "expected_log_prob"],
    "Laplace": ["density", "draw", "slope", "expected"],
    "StudentT": ["density", "draw", "slope"],
    "ScaleMixture": ["density", "draw"],
    "SpikeAndSlab": ["log_hyper", "_both"],
    "LogUniform": ["density", "draw"],
    "Bernoulli": ["density", "draw"],
    "MatrixNormal": ["log_prob"],
    "Centered": ["log_prob", "sample"],
}
METHODS = {
    "dubito.MAP.update": ["method/map/sgd"],
    "dubito.Metropolis.move": [
        "method/metropolis/fixed step",
        "method/metropolis/asymmetric proposal",
        "method/metropolis/tuned",
    ],
    "dubito.ULA.move": ["method/ula/fixed step"],
    "dubito.MALA.move": ["method/mala/fixed step", "method/mala/tuned"],
    "dubito.MALA.move>langevin": ["method/mala/fixed step", "method/ula/fixed step"],
    "dubito.HMC.move": ["method/hmc/fixed step", "method/hmc/tuned"],
    "dubito.HMC.judge": ["method/hmc/fixed step"],
    "dubito.HMC.judge>rise": ["method/hmc/fixed step", "method/mala/fixed step"],
    "dubito.HMC.judge>kinetic": ["method/hmc/fixed step", "method/mala/fixed step"],
    "dubito.NUTS.move": ["method/nuts/fixed step"],
    "dubito.NUTS._branch": ["method/nuts/fixed step", "method/nuts/blocks"],
    "dubito.MAMS.move": ["method/mams/fixed step"],
    "dubito.MCLMC.move": ["method/mclmc/fixed step"],
    "dubito.SGLD.move": ["method/sgld/batches"],
    "dubito.SGHMC.factor": ["method/sghmc/batches"],
    "dubito.SGHMC.move": ["method/sghmc/batches"],
    "dubito.SWAG._collect": ["method/swag/full rank"],
    "dubito.SWAG._parts": ["method/swag/full rank"],
    "dubito.IVON._update": ["method/ivon/mean field"],
    "dubito.MeanTeacher.follow": ["definition/teacher average"],
    "dubito.PiModel.teach>squared": ["method/pi_model/noise"],
    "dubito.Variational._complexity": ["method/variational/mean field", "method/variational/full"],
}
PREDICT = {
    "dubito.tensors.covariances.Kronecker._propagate_layer": [
        "definition/linearized, kronecker",
        "definition/uncertain inputs, kronecker",
    ],
    "dubito.tensors.covariances.Kronecker._rotated_rows": ["definition/linearized, kronecker"],
    "dubito.tensors.covariances.Dense.propagate_output": ["method/laplace/dense", "definition/linearized, dense"],
    "dubito.posteriors.predictive.LatentMixture.uncertainty": [
        "form/Samples",
        "form/Gaussian",
        "likelihood/MultiTask",
        "likelihood/Gaussian",
    ],
    "dubito.posteriors.predictive.LatentMixture.f_var": ["form/Samples", "form/Mixture", "form/Gaussian"],
    "dubito.posteriors.predictive.LatentMixture.log_prob": ["form/Samples", "form/Mixture", "likelihood/Gaussian", "link/nodes"],
    "dubito.posteriors.predictive.LatentMixture.position_scores": [
        "form/Samples",
        "form/Mixture",
        "likelihood/Gaussian",
        "link/nodes",
    ],
    "dubito.posteriors.Gaussian.log_prob": ["form/Gaussian"],
    "dubito.posteriors.predict.dropout.Masks.__init__": ["form/Stochastic"],
    "dubito.Categorical.linked": ["link/probit", "link/pairwise", "link/bridge"],
    "dubito.Bernoulli.linked": ["link/probit"],
    "dubito.measures._variances": ["measure/total_variance", "measure/aleatoric_variance", "measure/epistemic_variance"],
    "dubito.measures._beside_top": ["measure/one_minus_max", "measure/margin"],
    "dubito.measures.variation_ratio": ["measure/variation_ratio"],
    "dubito.measures.margin": ["measure/margin"],
}
TARGETS: dict[str, list[str]] = {
    **METHODS,
    **{
        f"dubito.{kind}.{name}": [*DEFINITIONS.get(kind, []), f"likelihood/{kind}"]
        for kind, names in LIKELIHOODS.items()
        for name in names
    },
    **{f"dubito.priors.{kind}.{name}": [f"prior/{kind}"] for kind, names in PRIORS.items() for name in names},
    "dubito.likelihoods.Classes.log_prob": ["likelihood/Categorical", "definition/missing targets"],
    "dubito.likelihoods.Categorical.logits": ["definition/noise levels"],
    **PREDICT,
}
# a regular expression of mutants that the checks of their function do not notice -> the test that does, in place of these
ELSEWHERE: dict[str, str] = {
    r"SWAG\._parts: held - 1 -> ": "methods/test_swag.py::test_the_moments_are_those_of_the_weights_at_the_ends_of_epochs",
    r"IVON\._update: (1 - self\.momentum|rate \*|self\.initial_hessian|len\()": "methods/test_ivon.py::test_a_step_is_the_formulas",
    r"IVON\._update: (-step / begun|self\.clip)": "methods/test_ivon.py::test_a_step_is_the_formulas",
    r"ULA\.move: state\.step <": "methods/test_samplers.py::test_ula_finds_a_step_at_which_its_bias_is_small",
    r"ULA\.move: -change\.nan_to_num": "test_full_batch.py::test_an_energy_that_is_not_finite_is_a_counted_divergence",
    r"MCLMC\.move: (state\.step <|rise\()": "methods/test_samplers.py::test_mclmc_is_right_up_to_its_bias",
    r"MCLMC\.move: -before\.velocity": "test_full_batch.py::test_a_particle_that_runs_off_turns_round",
    r"MAMS\.move: change > 1000": "methods/test_samplers.py::test_chains_from_anywhere_have_the_exact_moments",
    r"Variational\._complexity: -1 / n -> ": "methods/test_variational.py::test_the_prior_of_the_noise_counts_once",
    r"Variational\._complexity: -target\.temperature": "methods/test_variational.py::test_other_families_find_the_mean",
    r"(HMC|NUTS)\.move: .* \* \(state\.scale > 0\) -> ": "test_full_batch.py::test_what_gibbs_moves_draw_has_no_share_in_the_energy",
    r"(HMC\.judge|NUTS\.move): potential\(": "test_full_batch.py::test_energies_are_those_of_the_hamiltonian_at_the_draw",
    r"NUTS\.move: (-step ->|branch\.weight - weight)": "methods/test_nuts.py::test_a_trajectory_is_the_recursions",
    r"NUTS\.move: dice\(error, generator\) < 0\.5": "methods/test_nuts.py::test_a_trajectory_is_the_recursions",
    r"NUTS\._branch: (size >=|.* > NUMBERS)": "methods/test_nuts.py::test_a_branch_is_what_the_recursion_builds",
    r"NUTS\._branch: block > 1": "methods/test_nuts.py::test_a_point_of_a_branch_is_drawn_by_its_weight",
}
ELSEWHERE = {pattern: f"tests/inference/{test}" for pattern, test in ELSEWHERE.items()}
LEFT_OUT: dict[str, str] = {  # a regular expression of mutants -> why nothing can notice them
    r"Categorical\.random_slope: .*device != ": "differs on a GPU only",
    r"HeteroscedasticCategorical\._noisy: logits \+ .* -> logits - ": "the nodes come in pairs, z and -z",
    r"(Laplace|LogUniform)\.draw: .* \* (random_)?signs": "a sign is 1 or -1",
    r"Categorical\.linked: 1 / classes -> ": "shifts all logits alike, which cancels in the probabilities",
    r"Categorical\.linked: 100 \* ": "a bound for rounding errors",
    r"(Metropolis|ULA)\.move: \w+\.log_likelihood \+ .* -> \w+\.log_likelihood - ": "it is asked only whether both are finite",
    r"Variational\._complexity: state\.step % REPORTED": "how often a value is reported",
    r"Kronecker\._rotated_rows: (positions <|classes \* outputs)": "decides in which order a product is computed",
    r"NUTS\._branch: end\.position\.numel\(\) \* LARGEST -> ": "how much memory a block may take",
    r"HMC\.move: 1 \+ self\.jitter .* -> 1 - self\.jitter": "what the jitter is multiplied by is uniform in [-1, 1]",
}
