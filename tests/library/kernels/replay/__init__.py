"""Kernels replayed without Python, on this processor or on an emulated one: `cases.py` writes what they are to compute
and what plain PyTorch computes, and `replay.cpp` compares.
"""
