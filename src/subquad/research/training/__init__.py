"""Train transformers with any attention: models, tasks, and one function that trains."""
