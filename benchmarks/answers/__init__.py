"""Answers that policies keep, what retrieval finds, and other projects' methods beside ours."""
