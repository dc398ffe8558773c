"""How far stages may run ahead of each other: the staleness bound, and when groups enter."""
