"""The flow of a run: which stages its samples pass, resolved backwards from the columns that its algorithm reads."""
