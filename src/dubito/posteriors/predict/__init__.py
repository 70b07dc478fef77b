"""Ways to turn (model, weights, x) into a `Predictive`, named as in `posterior.predict(x, how=...)`.

`sampled` runs draws of weights or dropout masks (`dropout`); `linearized` propagates a covariance through the network's Jacobian;
`conjugate` is exact for a last layer; `streamlined/` and `adjoint` carry moments in one pass (`adjoint.one_pass` is their door). They
take weights, never a posterior, so that posteriors can call them without a cycle.
"""
