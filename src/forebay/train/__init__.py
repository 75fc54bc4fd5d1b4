"""Training: data, models, the step loop, checkpoints and metrics."""
