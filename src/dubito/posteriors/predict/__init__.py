"""Ways to turn (model, weights, x) into a `Predictive`, one a file, named as in `posterior.predict(x, how=...)`."""
