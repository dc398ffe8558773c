"""How the number of workers changes while a run goes on: restart budgets, scaling, autoscaling."""
