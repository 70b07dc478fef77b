"""From a model and data to a posterior.

Read in this order:

- `fit`: the one loop, `init -> step -> posterior`, with seeds, progress and checkpoints
- `batches`, `progress`, `plan`, `elbo`: data counted right; a progress bar; memory and time before a fit; the bound after it
- `methods`, `registry`, `presets`: one file a method; their names; how each is configured for ordinary problems
- `descent`, `sgmcmc`, `semi_supervised`, `augment`: what methods on mini-batches share
- `log_density`, `integrators`, `full_batch`, `kernels`: what samplers on all data share

May import `posteriors`, `curvature`, `model`, `network` and `tensors`.
"""
