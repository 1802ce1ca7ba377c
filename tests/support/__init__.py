"""What tests share: engines, models, prompts, expectations, and the one way inside the package."""
