"""`subquad compare`, for text models, and `sq.compare`, for any PyTorch module."""
