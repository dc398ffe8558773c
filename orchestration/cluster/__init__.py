"""Nodes of a cluster: placement of workers on them, and hosts on the nodes of a Ray cluster."""
