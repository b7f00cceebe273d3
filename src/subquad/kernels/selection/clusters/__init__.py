"""Clusters of queries, by the vectors or by their logits."""
