"""How workers are started: in this process, in processes of their own, and on other machines."""
