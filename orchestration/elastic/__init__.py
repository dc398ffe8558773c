"""The number of workers while a run goes on: restart budgets, scaling, autoscaling."""
