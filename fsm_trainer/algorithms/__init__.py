"""Pure torch functions of RL post-training: advantages, losses, KL estimators, masked sums."""
