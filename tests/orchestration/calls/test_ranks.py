"""A service whose engine trains on several ranks: processes under it, which end with it."""
