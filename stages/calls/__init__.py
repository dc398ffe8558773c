"""Training calls from outside: passes and optimizer steps that a client asks for one by one."""
