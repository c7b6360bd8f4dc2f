"""The server of a real fleet: its process, its members, its messages, its runs."""
