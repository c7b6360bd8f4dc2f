"""Who may talk to whom: keys, certificates, addresses, the guard of the server's port."""
