"""fsm-trainer: RL post-training in which every worker is a finite-state machine."""
