"""The doctor: what a checkpoint is and what is wrong with it, from headers, configs and small tensors; no engine."""
