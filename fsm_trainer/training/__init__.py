"""Training of one role on its ranks: batches, PPO and GRPO updates, the model behind a port."""
