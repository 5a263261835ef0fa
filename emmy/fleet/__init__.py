"""Many devices in one command: those of this machine, and those of a Ray cluster. The only room that knows Ray."""
