"""The sample flow: columns, the index, warehouses, controllers and the staleness gate.

Knows tensors and Redis, not RL.
"""
