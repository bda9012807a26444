"""Few queries: the keys are split among programs."""
