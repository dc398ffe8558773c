"""Start of workers: in this process, in processes of their own, and on other machines."""
