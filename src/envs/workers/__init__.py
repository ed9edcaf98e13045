"""Single environments as one batched environment, in this process or in worker processes."""
