"""Computes a step on a GPU, each kernel beside a plain torch reference that runs anywhere.

A public function takes tensors on any device: CUDA tensors go to the kernel, others to the reference. The kernels
themselves (``triton_*.py``, ``*.cu``) are imported or compiled at the first CUDA call.
"""
