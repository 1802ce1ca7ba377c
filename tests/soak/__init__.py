"""Load, faults and a pool that is too small; see CONTRIBUTING.md for its sizes."""
