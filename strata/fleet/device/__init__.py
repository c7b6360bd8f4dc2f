"""A device of a real fleet: its process, its own data, its work under a memory cap."""
