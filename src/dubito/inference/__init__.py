"""From a model and data to a posterior.

Read in this order:

- `method`: the `Method` protocol, `init -> step -> posterior`, and its `Traits`
- `fit`, `options`, `start`, `loop`, `checkpoint`: the public function, its settings as one value, and the one loop over the data
- `batches`, `shards`, `spread`: data counted right, and divided over processes; members on processes of their own
- `progress`, `plan`, `elbo`: a progress bar; memory and time before a fit; the bound after it
- `methods`, `registry`, `presets`: one file a method; their names; how each is configured for ordinary problems
- `descent`, `sgmcmc`, `semi_supervised`, `augment`, `members`: what methods on mini-batches and members of ensembles share
- `chains`, `full_batch`, `integrators`, `tuning`: what samplers with several chains, and those on all data, share
- `log_density`, `tracing`, `kernels`: the log posterior of flat vectors, and what makes it fast

May import `posteriors`, `curvature`, `model`, `network` and `tensors`.
"""
