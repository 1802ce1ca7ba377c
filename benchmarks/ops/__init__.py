"""Kernels alone: what retrieval and saliency cost beside the bytes that they have to move."""
