"""Sweeps: one recipe, run with several settings, each setting once.

--over ──▶ settings ──▶ every recipe checked ──▶ sweep.json ──▶ executor: a run's folder each, or a service's queue
              ▲                                     │  ▲              │
              └──── search (Optuna) ◀── end values ─┘  └── states ◀───┴──▶ steps ──▶ pruner, --stop-below ──▶ stop
"""
