"""Commands of ``asyncdock``, one file each; ``main`` has the command line itself."""
