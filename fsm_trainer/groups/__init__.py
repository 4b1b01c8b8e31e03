"""Process-group leases: rendezvous, epochs, open, revoke, close."""
