"""Every model type of transformers, small: its own attention against subquad's."""
