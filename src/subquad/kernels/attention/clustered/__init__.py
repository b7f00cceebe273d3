"""Clustered and improved clustered attention, each as one fused op."""
