"""`subquad tune`: trials of training with settings that Optuna chooses."""
