"""Schedulers and worker over random traffic, with a model that knows what every slot holds.

The project's schedulers, managers and model state run as in a server; only the forward pass is
simulated (`model`). It computes nothing: an entry of the KV cache is a number that says which
tokens it was made of, so a slot that holds anything but what its reader expects is found at once.
"""
