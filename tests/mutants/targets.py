"""What is broken, and which checks of the contract must notice it."""

from __future__ import annotations

LIKELIHOODS = {
    "Gaussian": ["log_prob", "fisher", "convolve", "rescaled", "log_prior"],
    "HeteroscedasticGaussian": ["log_prob", "fisher", "noise_variance", "convolve"],
    "Categorical": ["fisher", "fisher_sum", "fisher_diagonal", "fisher_root", "random_slope"],
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
    "dubito.tensors.covariances.Kronecker._propagate_layer": ["definition/linearized, kronecker"],
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
LEFT_OUT: dict[str, str] = {  # a regular expression of mutants -> why the contract cannot notice them
    r"Categorical\.random_slope: .*device != ": "differs on a GPU only",
    r"HeteroscedasticCategorical\._noisy: logits \+ .* -> logits - ": "the nodes come in pairs, z and -z",
    r"Categorical\.linked: 1 / classes -> ": "shifts all logits alike, which cancels in the probabilities",
    r"Categorical\.linked: 100 \* ": "a bound for rounding errors",
    r"(Metropolis|ULA)\.move: \w+\.log_likelihood \+ .* -> \w+\.log_likelihood - ": "it is asked only whether both are finite",
    r"SWAG\._parts: held - 1 -> ": "with 500 columns the factor 1 / (K - 1) hardly changes: test_swag.py has few",
    r"IVON\._update: (1 - self\.momentum|rate \*|self\.initial_hessian|len\()": "changes the path and not its end: test_ivon.py",
    r"IVON\._update: (-step / begun|self\.clip)": "changes the path and not its end: test_ivon.py",
    r"(ULA|MCLMC)\.move: state\.step < self\.burn_in": "nothing is tuned at a fixed step: test_samplers.py",
    r"ULA\.move: -change\.nan_to_num": "an acceptance that is noted in the trace, where nothing is rejected",
    r"MCLMC\.move: rise\(": "an energy error that is noted in the trace and used to tune the step: test_samplers.py",
    r"MCLMC\.move: -before\.velocity": "concerns a chain whose numbers overflow",
    r"Variational\._complexity: -1 / n -> ": "concerns the prior of a learned noise: test_variational.py",
    r"Variational\._complexity: state\.step % REPORTED": "how often a value is reported",
    r"Variational\._complexity: -target\.temperature": "concerns families whose divergence has no closed form: test_variational.py",
    r"MAMS\.move: change > 1000": "a divergence that is noted in the trace",
    r"NUTS\.move: .* \* \(state\.scale > 0\) -> ": "concerns a learned noise: test_sampled_noise.py",
    r"NUTS\.move: dice\(error, generator\) < 0\.5 -> ": "forwards and backwards are equally likely",
    r"Kronecker\._propagate_layer: (len\(roots\)|product \* root)": "concerns several multiples of the prior at a time",
    r"Kronecker\._propagate_layer: (total \+ torch|basis\[)": "concerns noise on the inputs, which one pass has",
    r"Kronecker\._rotated_rows: (positions <|len\(rows\) \*)": "decides in which order it is computed",
    r"NUTS\.move: -step -> step": "goes over the same points twice, which the law hardly shows: test_nuts.py",
    r"NUTS\.move: branch\.weight - weight -> ": "at this step both halves weigh almost the same, and nearly every new one is taken",
    r"NUTS\.move: potential\(": "an energy that is noted in the trace: test_samplers.py",
    r"NUTS\._branch: block > 1": "always the first point of a block, which is nearly as probable: test_nuts.py counts the points drawn",
    r"NUTS\._branch: (size >= SMALLEST|end\.position\.numel)": "how many points are looked at together",
    r"Dense\.propagate_output: (len\(factors\) > 1|layer\.width - inputs)": "decides which of two ways to compute it is taken",
    r"HMC\.judge: potential\(": "an energy that is noted in the trace, for diagnostics: test_samplers.py",
    r"HMC\.move: .* \* \(state\.scale > 0\) -> ": "concerns a learned noise: test_sampled_noise.py",
    r"HMC\.move: 1 \+ self\.jitter .* -> 1 - self\.jitter": "what the jitter is multiplied by is uniform in [-1, 1]",
}
