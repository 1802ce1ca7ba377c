"""Tuning weights for SPEED: sweeps over cutoffs, trials of settings, and what a step takes."""
